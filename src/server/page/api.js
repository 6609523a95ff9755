// What the page asks of the server.

export const byId = (id) => document.getElementById(id);

export const count = (number) => number.toLocaleString('en-US');

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

async function call(path, options = {}) {
  const headers = {...options.headers};
  if (byId('key').value) {
    headers.Authorization = 'Bearer ' + byId('key').value;
  }
  const response = await fetch(path, {...options, headers});
  if (!response.ok) {
    let message = `${response.status} ${response.statusText}`;
    try {
      message = (await response.json()).error.message;
    } catch {
      // Not ours: a proxy's page, say.
    }
    throw new Error(message);
  }
  return response;
}

export async function getJson(path) {
  return (await call(path)).json();
}

// Posts `body` and yields the events of the answer as objects, until [DONE].
export async function* streamJson(path, body, signal) {
  const response = await call(path, {
    method: 'POST',
    headers: {'Content-Type': 'application/json'},
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {value, done} = await reader.read();
    if (done) {
      throw new Error('The connection ended before the answer did.');
    }
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data: ')) {
        continue;
      }
      if (line === 'data: [DONE]') {
        return;
      }
      const event = JSON.parse(line.slice(6));
      if (event.error) {
        throw new Error(event.error.message);
      }
      yield event;
    }
  }
}
