// Give the keyboard to the screen as soon as it is there, so that keys work without a click.
new MutationObserver((_changes, observer) => {
  const keyboard = document.querySelector(".xterm-helper-textarea");
  if (keyboard) {
    observer.disconnect();
    keyboard.focus();
  }
}).observe(document, { childList: true, subtree: true });
