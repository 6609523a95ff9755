// One prompt to /v1/completions, the answer as it comes.
'use strict';
const byId = (id) => document.getElementById(id);
let running = null;

async function complete(prompt) {
  const headers = {'Content-Type': 'application/json'};
  if (byId('key').value) {
    headers.Authorization = 'Bearer ' + byId('key').value;
  }
  const response = await fetch('v1/completions', {
    method: 'POST',
    headers,
    signal: running.signal,
    body: JSON.stringify({
      prompt,
      max_tokens: Number(byId('max-tokens').value),
      temperature: Number(byId('temperature').value),
      stream: true,
      stream_options: {include_usage: true},
    }),
  });
  if (!response.ok) {
    throw new Error((await response.json()).error.message);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {value, done} = await reader.read();
    if (done) {
      return;
    }
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data: ') || line === 'data: [DONE]') {
        continue;
      }
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) {
        throw new Error(chunk.error.message);
      }
      for (const choice of chunk.choices) {
        byId('answer').textContent += choice.text;
      }
      if (chunk.usage) {
        byId('status').textContent =
            `${chunk.usage.prompt_tokens} + ${chunk.usage.completion_tokens} tokens`;
      }
    }
  }
}

byId('form').addEventListener('submit', async (event) => {
  event.preventDefault();
  running = new AbortController();
  byId('answer').textContent = '';
  byId('status').textContent = '';
  byId('send').disabled = true;
  byId('stop').disabled = false;
  try {
    await complete(byId('prompt').value);
  } catch (error) {
    byId('status').textContent = error.message;
  }
  byId('send').disabled = false;
  byId('stop').disabled = true;
});
byId('stop').addEventListener('click', () => running.abort());
