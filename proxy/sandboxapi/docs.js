'use strict';
// The search box hides the sections, and the links to them, that lack one of its words.
const box = document.querySelector('input'), none = document.querySelector('output'), menu = document.querySelector('nav details');
const entries = [...document.querySelectorAll('section')].map(section => ({
  section, text: section.textContent.toLowerCase(), link: document.querySelector('nav a[href="#' + section.id + '"]'),
}));
const wide = matchMedia('(min-width: 64rem)');
function search() {
  const words = box.value.toLowerCase().split(/\s+/);
  let found = 0;
  for (const e of entries) {
    const hit = words.every(word => e.text.includes(word));
    e.section.hidden = !hit;
    if (e.link) e.link.hidden = !hit;
    found += hit;
  }
  for (const group of document.querySelectorAll('main > div, nav div')) {
    group.hidden = !group.querySelector('section:not([hidden]), a:not([hidden])');
  }
  none.value = box.value.trim() ? found + ' found' : '';
}
function unfold() { menu.open = wide.matches; }
box.addEventListener('input', search);
wide.addEventListener('change', unfold);
document.addEventListener('keydown', event => {
  if (event.key === '/' && event.target !== box) { event.preventDefault(); box.focus(); }
});
window.addEventListener('hashchange', () => { // a link leads to what the search may have hidden
  const target = document.getElementById(location.hash.slice(1));
  if (target && target.hidden) { box.value = ''; search(); target.scrollIntoView(); }
});
unfold();
search(); // the browser may have kept what was typed
