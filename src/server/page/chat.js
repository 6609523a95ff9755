// The chat: messages, settings, an answer as it comes and how fast it came.
import {byId, count, element, streamJson} from './api.js';
import {EXAMPLES} from './examples.js';

const NUMBERS = ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'seed'];
const KEPT = [...NUMBERS, 'stop_strings', 'system', 'raw', 'record'];
let messages = [];
let running = null;

export function stop() {
  running?.abort();
}

function keepSettings() {
  const kept = {};
  for (const id of KEPT) {
    kept[id] = byId(id).type === 'checkbox' ? byId(id).checked : byId(id).value;
  }
  try {
    localStorage.setItem('lacuna-settings', JSON.stringify(kept));
  } catch {
    // Storage may be forbidden; the settings then last as long as the page.
  }
}

function applySettings(settings) {
  for (const [id, value] of Object.entries(settings)) {
    if (!KEPT.includes(id)) {
      continue;
    }
    if (byId(id).type === 'checkbox') {
      byId(id).checked = value;
    } else {
      byId(id).value = value;
    }
  }
}

function keptSettings() {
  try {
    return JSON.parse(localStorage.getItem('lacuna-settings'));
  } catch {
    return null;
  }
}

function readSettings() {
  const body = {};
  for (const id of NUMBERS) {
    if (byId(id).value !== '') {
      body[id] = Number(byId(id).value);
    }
  }
  const strings = byId('stop_strings').value.split('\n').filter((line) => line !== '');
  if (strings.length > 0) {
    body.stop = strings.map((line) => line.replaceAll('\\n', '\n').replaceAll('\\t', '\t'));
  }
  return body;
}

function requestOf(prompt) {
  const body = {
    ...readSettings(),
    stream: true,
    stream_options: {include_usage: true},
    record_selection: byId('record').checked,
  };
  if (byId('raw').checked) {
    return ['v1/completions', {...body, prompt}];
  }
  const system = byId('system').value.trim();
  const turns = system ? [{role: 'system', content: system}] : [];
  return ['v1/chat/completions',
          {...body, messages: [...turns, ...messages, {role: 'user', content: prompt}]}];
}

function addMessage(role, text) {
  byId('empty').hidden = true;
  const body = element('div', {className: 'text', textContent: text});
  const foot = element('p', {className: 'foot'});
  const message =
      element('article', {className: `message ${role}`},
              element('h3', {textContent: role === 'user' ? 'You' : 'Model'}), body, foot);
  byId('log').append(message);
  byId('log').scrollTop = byId('log').scrollHeight;
  body.scrollTop = body.scrollHeight;
  return {body, foot, message};
}

// Seconds and tokens of one answer.
class Stopwatch {
  constructor() {
    this.begin = performance.now();
    this.first = null;
    this.last = null;
    this.events = 0;
    this.usage = null;
  }
  token() {
    this.last = performance.now();
    this.first ??= this.last;
    ++this.events;
  }
  text(end) {
    if (this.first === null) {
      return end ?? 'reading the prompt…';
    }
    const tokens = this.usage?.completion_tokens ?? this.events;
    // The first token's time belongs to the prompt.
    const seconds = Math.max(this.last - this.first, 0.1) / 1000;
    const rate = tokens > 1 ? count(Math.round((tokens - 1) / seconds)) : '–';
    const wait = count(Math.round(this.first - this.begin));
    const parts = [`${rate} tokens/s`, `first token ${wait} ms`];
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`${count(this.usage.prompt_tokens)} prompt tokens` +
                 (cached > 0 ? ` (${count(cached)} cached)` : ''));
      parts.push(`${count(tokens)} generated`);
    } else {
      parts.push(`${count(tokens)} tokens`);
    }
    if (end) {
      parts.push(end);
    }
    return parts.join(' · ');
  }
}

async function send(prompt) {
  const [path, body] = requestOf(prompt);
  running = new AbortController();
  byId('send').disabled = true;
  byId('stop').disabled = false;
  byId('log').setAttribute('aria-busy', 'true');
  addMessage('user', prompt);
  const answer = addMessage('model', '');
  const watch = new Stopwatch();
  byId('speed').textContent = watch.text();
  let text = '';
  let thoughts = '';
  let id = '';
  let end = '';
  // What came since the last frame is drawn at once: a fast model sends more tokens than a screen
  // has frames, and a layout for each would fall behind.
  let frame = null;
  const paint = () => {
    cancelAnimationFrame(frame);
    frame = null;
    if (thoughts) {
      answer.thoughts ??= answer.body.parentNode.insertBefore(
          element('div', {className: 'thoughts'}), answer.body);
      answer.thoughts.textContent = thoughts;
    }
    answer.body.textContent = text;
    byId('speed').textContent = watch.text();
    byId('log').scrollTop = byId('log').scrollHeight;
  };
  try {
    for await (const chunk of streamJson(path, body, running.signal)) {
      // The answer may have arrived whole already: then there is nothing left to abort.
      running.signal.throwIfAborted();
      id = chunk.id;
      for (const choice of chunk.choices) {
        const thought = choice.delta?.reasoning_content ?? '';
        const piece = choice.text ?? choice.delta?.content ?? '';
        if (thought || piece) {
          watch.token();
        }
        thoughts += thought;
        text += piece;
        end = choice.finish_reason ?? end;
      }
      watch.usage = chunk.usage ?? watch.usage;
      frame ??= requestAnimationFrame(paint);
    }
  } catch (error) {
    if (error.name === 'AbortError') {
      end = 'stopped';
    } else {
      end = error.message;
      answer.message.classList.add('failed');
    }
  }
  paint();
  if (!byId('raw').checked && text) {
    messages.push({role: 'user', content: prompt}, {role: 'assistant', content: text});
  }
  answer.foot.textContent = watch.text(end);
  if (id && body.record_selection) {
    answer.foot.append(' · ', element('a', {
                         href: `#attention/${id}`,
                         textContent: 'Attention',
                       }));
  }
  byId('speed').textContent = '';
  byId('log').setAttribute('aria-busy', 'false');
  byId('log').scrollTop = byId('log').scrollHeight;
  byId('send').disabled = false;
  byId('stop').disabled = true;
  running = null;
}

export function offerExamples(offered) {
  const bar = byId('examples');
  bar.replaceChildren();
  bar.hidden = !offered;
  if (!offered) {
    return;
  }
  bar.append(element('span', {className: 'hint', textContent: 'Examples'}));
  for (const example of EXAMPLES) {
    const button = element('button', {type: 'button', textContent: example.name});
    button.addEventListener('click', () => {
      byId('prompt').value = example.prompt;
      applySettings({raw: true, temperature: 0, max_tokens: 16, stop_strings: '\\n'});
      byId('prompt').focus();
      byId('prompt').scrollTop = byId('prompt').scrollHeight;
    });
    bar.append(button);
  }
}

export function setUpChat() {
  applySettings(keptSettings() ?? {});
  // Beside the chat there is room for the settings, above it there is not.
  byId('settings').open = matchMedia('(min-width: 900px)').matches;
  byId('settings').addEventListener('change', keepSettings);
  byId('form').addEventListener('submit', (event) => {
    event.preventDefault();
    const prompt = byId('prompt').value;
    if (running === null && prompt !== '') {
      byId('prompt').value = '';
      send(prompt);
    }
  });
  byId('prompt').addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId('form').requestSubmit();
    }
  });
  byId('stop').addEventListener('click', stop);
  byId('clear').addEventListener('click', () => {
    stop();
    messages = [];
    byId('log').replaceChildren(byId('empty'));
    byId('empty').hidden = false;
    byId('prompt').focus();
  });
}
