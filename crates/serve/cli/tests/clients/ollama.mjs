// Ollama's package for JavaScript: chat, streaming, tools, reasoning, models, errors, and a client
// that cancels.
import assert from 'node:assert/strict';
import { Ollama } from 'ollama';

const client = new Ollama({ host: process.env.STOLON_URL.replace(/\/v1$/, '') });
const model = 'scripted';
const options = { temperature: 0, num_ctx: 4096 };
const ask = (content) => ({ model, options, messages: [{ role: 'user', content }] });
const weather = {
  type: 'function',
  function: {
    name: 'get_weather',
    description: 'The weather of a city.',
    parameters: { type: 'object', properties: { city: { type: 'string' }, days: { type: 'integer' } } },
  },
};

const whole = await client.chat({ ...ask('Say something. script:plain'), keep_alive: '5m' });
assert.equal(whole.message.content, 'Hello, world.');
assert.equal(whole.done_reason, 'stop');
assert.ok(whole.eval_count > 0 && whole.total_duration > 0);

let text = '';
let last;
for await (const piece of await client.chat({ ...ask('Say something. script:plain'), stream: true })) {
  text += piece.message.content;
  last = piece;
}
assert.equal(text, 'Hello, world.');
assert.ok(last.done && last.eval_count === whole.eval_count);

const asked = { ...ask('What is the weather? script:call'), tools: [weather] };
const called = await client.chat(asked);
const [call] = called.message.tool_calls;
assert.deepEqual(call.function.arguments, { city: 'Paris', days: 2 });
const result = { role: 'tool', tool_name: 'get_weather', content: '18 degrees. script:plain' };
const messages = [...asked.messages, called.message, result];
assert.equal((await client.chat({ ...asked, messages })).message.content, 'Hello, world.');

const thought = await client.chat({ ...ask('script:think'), think: true });
assert.ok(thought.message.thinking.length > 0);

const generated = await client.generate({ model, options, prompt: 'Now script:plain' });
assert.equal(generated.response, 'Hello, world.');

assert.equal((await client.list()).models[0].name, 'scripted:latest');
assert.equal((await client.ps()).models[0].model, 'scripted:latest');
const shown = await client.show({ model });
assert.ok(shown.capabilities.includes('tools'));
assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);

await assert.rejects(client.pull({ model: 'llama3.2' }), /stolon serve --model/);
await assert.rejects(client.delete({ model }), (error) => error.status_code === 501);
await assert.rejects(client.chat({ ...ask('x'), format: 'xml' }), /format/);

const endless = { ...ask('Hello'), options: { temperature: 1, num_predict: -1 }, stream: true };
const stream = await client.chat(endless);
setTimeout(() => stream.abort(), 50);
await assert.rejects(async () => {
  for await (const piece of stream) assert.ok(piece.model);
  throw new DOMException('it ended by itself', 'AbortError');
}, { name: 'AbortError' });

console.log('ollama for JavaScript: all checks passed');
