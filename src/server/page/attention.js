// The attention view: which earlier tokens each indexer selected for the token under the cursor.
//
// A layer with an indexer leads the layers after it that have none, so one list serves a group of
// layers. The row at position p is what the model computed when it read token p; its lists name the
// tokens that it attended to. The last token of an answer was never read and has no row.
import {byId, count, element, getJson} from './api.js';

const LANE_COLORS = {'sparse MQA': '--lane-sparse', 'dense MHA': '--lane-dense',
                     'masked MHA': '--lane-masked'};
const GROUP_COLORS = 5;  // --group-0 to --group-4 of the style sheet, then from the beginning
const MAP_ROWS_MAX = 6;  // groups that have a line of their own in the map

let scene = null;  // what is shown
let loading = '';  // the id of the newest call of showRequest()

const colorOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function laneTotals(request) {
  return Object.entries(request.rows).map(([lane, rows]) => `${count(rows)} ${lane}`).join(', ');
}

export async function showRequests(chosen) {
  const list = byId('requests');
  let data;
  try {
    ({data} = await getJson('v1/lacuna/requests'));
  } catch (error) {
    list.replaceChildren(element('li', {className: 'note', textContent: error.message}));
    return;
  }
  const focused = list.contains(document.activeElement) ? document.activeElement.hash : '';
  list.replaceChildren();
  for (const request of data) {
    const share = request.keys_visible > 0 ? request.keys_read / request.keys_visible : 1;
    const link = element(
        'a', {href: `#attention/${request.id}`},
        element('b', {
          textContent: `${count(request.prompt_tokens)} + ` +
              `${count(request.completion_tokens)} tokens`,
        }),
        element('span', {textContent: new Date(request.created * 1000).toLocaleTimeString()}),
        element('small', {
          textContent: `${request.finish_reason ?? 'running'} · ${laneTotals(request)} · read ` +
              `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} % of the keys` +
              (request.finish_reason && !request.has_selection ? ' · not recorded' : ''),
        }));
    if (request.id === chosen) {
      link.setAttribute('aria-current', 'true');
    }
    list.append(element('li', {}, link));
    if (focused === link.hash) {
      link.focus();
    }
  }
  if (data.length === 0) {
    list.append(element('li', {className: 'note', textContent: 'None yet.'}));
  }
}

function showNote(text) {
  byId('scene-note').textContent = text;
  byId('scene-note').hidden = text === '';
  byId('scene-body').hidden = text !== '';
}

// The lane and the step of every row. A recorded prompt is computed from its first token, whatever
// the prefix cache holds; `rows` of a step are in the order of their lanes.
function rowsOfSteps(request) {
  const rows = [];
  request?.steps.forEach((step, number) => {
    for (const [lane, many] of Object.entries(step.rows)) {
      for (let i = 0; i < many; ++i) {
        rows.push({lane, step: number, phase: step.phase});
      }
    }
  });
  return rows;
}

function groupsOf(selection) {
  return selection.layers.map((entry, i) => {
    const last = i + 1 < selection.layers.length ? selection.layers[i + 1].layer - 1 :
                                                   (selection.num_layers ?? entry.layer + 1) - 1;
    return {
      layer: entry.layer,
      name: last > entry.layer ? `Layers ${entry.layer}–${last}` : `Layer ${entry.layer}`,
      rows: new Map(entry.rows.map((row) => [row.position, row.keys])),
    };
  });
}

// Waits until the request has ended: its lists come with its end.
async function finished(id) {
  for (;;) {
    const {data} = await getJson('v1/lacuna/requests');
    const request = data.find((entry) => entry.id === id);
    if (!request || request.finish_reason || loading !== id) {
      return request;
    }
    showNote(`Running: ${count(request.prompt_tokens)} + ${count(request.completion_tokens)} ` +
             `tokens, ${laneTotals(request)}. The selected keys follow when it ends.`);
    await new Promise((resolve) => setTimeout(resolve, 500));
  }
}

export async function showRequest(id) {
  if (loading === id && scene) {
    return;
  }
  loading = id;
  scene = null;
  showNote('Loading…');
  let request;
  let selection;
  try {
    request = await finished(id);
    selection = await getJson(`v1/lacuna/requests/${id}/selection`);
  } catch (error) {
    if (loading === id) {
      showNote(error.message);
      loading = '';
    }
    return;
  }
  if (loading !== id) {
    return;  // another one was chosen meanwhile
  }
  showRequests(id);
  const groups = groupsOf(selection);
  scene = {
    selection,
    groups,
    chosen: 0,  // a group's number; groups.length for all
    steps: rowsOfSteps(request),
    texts: textsOf(selection.tokens).map(visibleText),
    spans: [],
    marked: [],
    cursor: 0,
    shown: -1,
  };
  showNote('');
  drawTokens();
  drawLegend();
  drawGroups();
  const rows = [...(groups[0]?.rows.keys() ?? [])];
  // The row that chose the first token of the answer, if the answer has one.
  const first = selection.prompt_tokens - 1;
  moveTo(rows.includes(first) ? first : rows.at(-1) ?? 0);
  byId('tokens').focus({preventScroll: true});
}

function drawGroups() {
  const bar = byId('groups');
  bar.replaceChildren();
  const names = scene.groups.map((group) => group.name);
  if (names.length > 1) {
    names.push('All');
  }
  names.forEach((name, i) => {
    const isAll = i === scene.groups.length;
    const button = element('button', {type: 'button', id: `group-${i}`},
                           element('i', {className: isAll ? 'swatch all' :
                                                            `swatch g${i % GROUP_COLORS}`}),
                           name, element('kbd', {textContent: isAll ? '0' : String(i + 1)}));
    button.setAttribute('role', 'radio');
    button.addEventListener('click', () => choose(i));
    button.addEventListener('keydown', (event) => {
      const by = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
      if (by) {
        event.preventDefault();
        choose((scene.chosen + by + names.length) % names.length);
        byId(`group-${scene.chosen}`).focus();
      }
    });
    bar.append(button);
  });
  choose(scene.chosen);
}

function choose(group) {
  scene.chosen = group;
  [...byId('groups').children].forEach((button, i) => {
    button.setAttribute('aria-checked', String(i === group));
    button.tabIndex = i === group ? 0 : -1;
  });
  redraw();
}

function visibleText(text) {
  if (text === '') {
    return '‥';
  }
  const named = {'\n': '↵', '\t': '⇥', '\r': '␍', ' ': '·'};
  if (text.trim() === '') {
    return [...text].map((letter) => named[letter] ?? letter).join('');
  }
  return text.replaceAll('\n', '↵');
}

// A character may be spread over tokens: the one that completes it shows it.
function textsOf(tokens) {
  const decoder = new TextDecoder();
  return tokens.map((token) => {
    const bytes = token.bytes ? new Uint8Array(token.bytes) : new TextEncoder().encode(token.text);
    return decoder.decode(bytes, {stream: true});
  });
}

function drawTokens() {
  const {tokens, prompt_tokens: promptTokens} = scene.selection;
  const all = document.createDocumentFragment();
  scene.spans = tokens.map((token, i) => {
    const span = element('span', {id: `t${i}`, textContent: scene.texts[i]});
    span.setAttribute('role', 'option');
    span.dataset.i = i;
    if (token.text.trim() === '' || scene.texts[i] === '‥') {
      span.classList.add('blank');
    }
    if (i > 0 && tokens[i - 1].block !== token.block || i === 0) {
      const mark = element('i', {className: 'block', textContent: token.block});
      mark.setAttribute('aria-hidden', 'true');
      all.append(mark);
    }
    if (i >= promptTokens) {
      span.classList.add('answer');
    }
    all.append(span);
    if (token.text.endsWith('\n')) {
      all.append(element('br'));
    }
    return span;
  });
  byId('tokens').replaceChildren(all);
}

// The lists of one position by group: an array, null for a dense row, undefined without a row.
function listsAt(position) {
  return scene.groups.map((group) => group.rows.get(position));
}

function chosenLists(position) {
  const lists = listsAt(position);
  return scene.chosen < lists.length ? [lists[scene.chosen]] : lists;
}

function markKeys(position) {
  const lists = chosenLists(position);
  const votes = new Map();
  for (const keys of lists) {
    const read = keys === null ? Array.from({length: position + 1}, (_, i) => i) : keys ?? [];
    for (const key of read) {
      votes.set(key, (votes.get(key) ?? 0) + 1);
    }
  }
  for (const span of scene.marked) {
    span.classList.remove('key', 'weak');
    span.removeAttribute('aria-selected');
  }
  scene.marked = [];
  for (const [key, many] of votes) {
    const span = scene.spans[key];
    span.classList.add('key');
    span.classList.toggle('weak', many < lists.length);
    span.setAttribute('aria-selected', 'true');
    scene.marked.push(span);
  }
  const group = scene.chosen < scene.groups.length ? scene.chosen % GROUP_COLORS : 'all';
  byId('tokens').dataset.group = group;
  return votes;
}

function fact(name, value) {
  return element('div', {}, element('dt', {textContent: name}),
                 element('dd', {textContent: value}));
}

function showFacts(position, votes) {
  const {tokens} = scene.selection;
  const token = tokens[position];
  const step = scene.steps[position];
  const visible = position + 1;
  const facts = [fact('Token', `${count(position)} “${scene.texts[position]}”`)];
  const lists = listsAt(position);
  if (lists.every((keys) => keys === undefined)) {
    facts.push(fact('Keys', 'the last token, never read'));
  } else {
    if (position + 1 < tokens.length) {
      facts.push(fact('Next', `“${scene.texts[position + 1]}”`));
    }
    lists.forEach((keys, i) => {
      facts.push(fact(scene.groups[i].name,
                      keys === null ? 'dense: all keys' :
                                      `${count(keys.length)} of ${count(visible)} keys`));
    });
    const blocks = new Set([...votes.keys()].map((key) => tokens[key].block));
    facts.push(fact('Cache blocks read', `${blocks.size} of ${token.block + 1}`));
  }
  if (step) {
    facts.push(fact('Lane', `${step.lane}, ${step.phase} step ${step.step + 1}`));
  }
  byId('facts').replaceChildren(...facts);
  for (const child of byId('facts').children) {
    const group = scene.groups.findIndex((entry) => entry.name === child.firstChild.textContent);
    if (group >= 0) {
      child.classList.add(`g${group % GROUP_COLORS}`);
    }
  }
}

// From the left: the cache blocks, the keys of each group, the lane of each row.
function drawMap(position, votes) {
  const canvas = byId('canvas');
  const {tokens} = scene.selection;
  const width = byId('map').clientWidth;
  if (width === 0) {
    return;  // the other view is shown
  }
  const shown = scene.groups.length <= MAP_ROWS_MAX ? scene.groups.map((_, i) => i) :
      scene.chosen < scene.groups.length            ? [scene.chosen] :
                                                      [];
  const lines = shown.map((i) => ({
    name: scene.groups[i].name,
    color: colorOf(`--group-${i % GROUP_COLORS}`),
    keys: scene.groups[i].rows.get(position),
    faint: scene.chosen !== i && scene.chosen !== scene.groups.length,
  }));
  const gutter = 92;
  const row = 18;
  const height = row * (lines.length + 2) + 2;
  const scale = devicePixelRatio;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const draw = canvas.getContext('2d');
  draw.scale(scale, scale);
  draw.font = '11px system-ui, sans-serif';
  draw.textBaseline = 'middle';
  const step = (width - gutter) / tokens.length;
  const x = (i) => gutter + i * step;
  const ink = colorOf('--ink');
  const faint = colorOf('--ink-faint');
  const label = (text, number) => {
    draw.fillStyle = faint;
    draw.fillText(text, 0, number * row + row / 2);
  };
  // Blocks: those that hold a key of the chosen groups are full.
  const read = new Set([...votes.keys()].map((key) => tokens[key].block));
  label('Cache blocks', 0);
  const size = Math.max(scene.selection.block_size, 1);
  draw.font = `${size * step < 18 ? 9 : 11}px system-ui, sans-serif`;
  const widest = draw.measureText(String(tokens.at(-1).block)).width;
  for (let begin = 0; begin < tokens.length; begin += size) {
    const end = Math.min(begin + size, tokens.length);
    const {block} = tokens[begin];
    const room = x(end) - x(begin);
    draw.fillStyle = colorOf(read.has(block) ? '--block-read' : '--block');
    draw.fillRect(x(begin), 2, Math.max(room - 1, 0.5), row - 4);
    const text = String(block);
    if (size * step > widest + 2 && room > draw.measureText(text).width + 2) {
      draw.fillStyle = read.has(block) ? colorOf('--on-block-read') : faint;
      draw.textAlign = 'center';
      draw.fillText(text, (x(begin) + x(end) - 1) / 2, row / 2 + 1);
      draw.textAlign = 'start';
    }
  }
  draw.font = '11px system-ui, sans-serif';
  lines.forEach((line, i) => {
    const top = (i + 1) * row;
    label(line.name, i + 1);
    draw.fillStyle = colorOf('--track');
    draw.fillRect(gutter, top + 2, width - gutter, row - 4);
    draw.fillStyle = line.color;
    draw.globalAlpha = line.faint ? 0.45 : 1;
    if (line.keys === null) {
      draw.fillRect(gutter, top + 2, x(position + 1) - gutter, row - 4);
    }
    for (const key of line.keys ?? []) {
      draw.fillRect(x(key), top + 2, Math.max(step, 1), row - 4);
    }
    draw.globalAlpha = 1;
  });
  const top = (lines.length + 1) * row;
  label('Lane', lines.length + 1);
  draw.fillStyle = colorOf('--track');
  draw.fillRect(gutter, top + 2, width - gutter, row - 4);
  for (let begin = 0; begin < tokens.length;) {
    const entry = scene.steps[begin];
    let end = begin + 1;
    while (end < tokens.length && scene.steps[end]?.step === entry?.step &&
           scene.steps[end]?.lane === entry?.lane) {
      ++end;
    }
    if (entry) {
      const room = x(end) - x(begin);
      draw.fillStyle = colorOf(LANE_COLORS[entry.lane] ?? '--ink-faint');
      draw.fillRect(x(begin), top + 2, room > 3 ? room - 1 : room, row - 4);
    }
    begin = end;
  }
  draw.fillStyle = ink;
  draw.fillRect(x(position) + step / 2 - 0.75, 0, 1.5, height);
  canvas.setAttribute('aria-label', `Map of the context: ${byId('facts').innerText
      .replace(/\s+/g, ' ')}`);
}

function drawLegend() {
  const lanes = new Set(scene.steps.map((entry) => entry.lane));
  const entry = (name, text) => [element('i', {className: `swatch ${name}`}), text];
  const parts = [...lanes].flatMap(
      (lane) => entry('lane-' + lane.split(' ')[0], `lane ${lane}`));
  parts.push(...entry('read', 'cache block with a selected key'));
  parts.push(element('span', {className: 'sample answer', textContent: 'answer'}));
  byId('legend').replaceChildren(...parts);
}

function redraw() {
  if (scene && scene.shown >= 0) {
    const votes = markKeys(scene.shown);
    showFacts(scene.shown, votes);
    drawMap(scene.shown, votes);
  }
}

// Shows the keys of `position` without moving the cursor.
function show(position) {
  if (scene.shown !== position) {
    scene.spans[scene.shown]?.classList.remove('cursor');
    scene.spans[position].classList.add('cursor');
    scene.shown = position;
    redraw();
  }
}

function moveTo(position) {
  const cursor = Math.max(0, Math.min(position, scene.spans.length - 1));
  scene.cursor = cursor;
  byId('tokens').setAttribute('aria-activedescendant', `t${cursor}`);
  show(cursor);
  const box = byId('tokens');
  const span = scene.spans[cursor];
  const top = span.offsetTop;
  if (top < box.scrollTop + 8 || top > box.scrollTop + box.clientHeight - 32) {
    box.scrollTop = top - box.clientHeight / 2;
  }
}

// The token above or below, nearest in the line.
function lineMove(down) {
  const {spans, cursor} = scene;
  const {offsetTop, offsetLeft} = spans[cursor];
  const by = down ? 1 : -1;
  let i = cursor + by;
  while (spans[i] && spans[i].offsetTop === offsetTop) {
    i += by;
  }
  if (!spans[i]) {
    return cursor;
  }
  const line = spans[i].offsetTop;
  const distance = (other) => Math.abs(spans[other].offsetLeft - offsetLeft);
  let best = i;
  while (spans[i] && spans[i].offsetTop === line) {
    if (distance(i) < distance(best)) {
      best = i;
    }
    i += by;
  }
  return best;
}

function onKey(event) {
  if (!scene || event.ctrlKey || event.metaKey || event.altKey) {
    return;
  }
  const {cursor, spans, groups, selection} = scene;
  const moves = {
    ArrowLeft: () => cursor - 1,
    ArrowRight: () => cursor + 1,
    ArrowUp: () => lineMove(false),
    ArrowDown: () => lineMove(true),
    PageUp: () => cursor - selection.block_size,
    PageDown: () => cursor + selection.block_size,
    Home: () => 0,
    End: () => spans.length - 1,
  };
  if (moves[event.key]) {
    event.preventDefault();
    moveTo(moves[event.key]());
  } else if (/^[0-9]$/.test(event.key)) {
    const group = event.key === '0' ? groups.length : Number(event.key) - 1;
    if (group < byId('groups').children.length) {
      choose(group);
    }
  }
}

byId('tokens').addEventListener('keydown', onKey);
byId('tokens').addEventListener('mouseover', (event) => {
  if (scene && event.target.dataset.i) {
    show(Number(event.target.dataset.i));
  }
});
byId('tokens').addEventListener('mouseleave', () => scene && show(scene.cursor));
byId('tokens').addEventListener('click', (event) => {
  if (scene && event.target.dataset.i) {
    moveTo(Number(event.target.dataset.i));
  }
});
byId('canvas').addEventListener('click', (event) => {
  const gutter = 92;
  const share = (event.offsetX - gutter) / (byId('canvas').clientWidth - gutter);
  if (scene && share >= 0) {
    moveTo(Math.floor(share * scene.spans.length));
  }
});
byId('refresh').addEventListener('click', () => showRequests(location.hash.split('/')[1]));
for (const id of ['blocks', 'lines']) {
  const apply = () => byId('tokens').classList.toggle(id, byId(id).checked);
  byId(id).addEventListener('change', apply);
  apply();
}
new ResizeObserver(redraw).observe(byId('map'));
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
