// HTTP calls to the service: JSON, and streams of server-sent events.

/** An error of the service or the network, with a message for the user. */
class CallError extends Error {}

async function called(path, key, options = {}) {
  const headers = {...options.headers, ...(key ? {authorization: `Bearer ${key}`} : {})};
  let response;
  try {
    response = await fetch(path, {...options, headers});
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new CallError('The service cannot be reached.');
  }
  if (!response.ok) throw new CallError(await reasonOf(response));
  return response;
}

async function reasonOf(response) {
  if (response.status === 401) return 'The service asks for an API key: open "API key and more fields".';
  try {
    return (await response.json()).error.message;
  } catch {
    return `The service answered with status ${response.status}.`;
  }
}

const getJson = async (path, key) => (await called(path, key)).json();

/** The pieces of a stream, as they arrive. Throws CallError, also for an error in the middle of the stream. */
async function* streamed(path, body, key, signal) {
  const headers = {'content-type': 'application/json'};
  const response = await called(path, key, {method: 'POST', headers, body: JSON.stringify(body), signal});
  for await (const data of eventsOf(response.body)) {
    if (data === '[DONE]') return;
    const piece = JSON.parse(data);
    if (piece.error) throw new CallError(piece.error.message);
    yield piece;
  }
  throw new CallError('The stream broke off.');
}

async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const events = (text + value).split('\n\n');
    text = events.pop();
    for (const event of events) yield event.replace(/^data: /, '');
  }
}
