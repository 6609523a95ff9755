// The two views and the keys that work in both.
import {byId, getJson} from './api.js';
import {showRequest, showRequests} from './attention.js';
import {offerExamples, setUpChat, stop} from './chat.js';

const VIEWS = ['chat', 'attention'];

// The address after # is the state: "chat", "attention" or "attention/ID".
function route() {
  const [name, id] = location.hash.slice(1).split('/');
  const view = VIEWS.includes(name) ? name : 'chat';
  for (const other of VIEWS) {
    const tab = byId('tab-' + other);
    tab.setAttribute('aria-selected', String(other === view));
    tab.tabIndex = other === view ? 0 : -1;
    byId('view-' + other).hidden = other !== view;
  }
  if (view === 'attention') {
    showRequests(id);
    if (id) {
      showRequest(id);
    }
  }
}

for (const view of VIEWS) {
  const tab = byId('tab-' + view);
  tab.addEventListener('click', () => {
    location.hash = view;
  });
  tab.addEventListener('keydown', (event) => {
    if (event.key === 'ArrowLeft' || event.key === 'ArrowRight') {
      const other = VIEWS[(VIEWS.indexOf(view) + 1) % VIEWS.length];
      location.hash = other;
      byId('tab-' + other).focus();
    }
  });
}
addEventListener('hashchange', route);
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') {
    stop();
  }
});

// Asks again until the model is loaded: /v1/models is 503 before.
async function nameModel() {
  try {
    const {data} = await getJson('v1/models');
    byId('model').textContent = `${data[0].id}, context ${data[0].max_model_len}`;
    offerExamples(data.some((model) => model.id.endsWith('dsa-nano')));
  } catch (error) {
    byId('model').textContent = error.message;
    setTimeout(nameModel, 1000);
  }
}

setUpChat();
route();
nameModel();
byId('key').addEventListener('change', nameModel);
