//! The parts of random vision models that text models do not have: a tokenizer with the tokens that
//! mark images, and a chat template with places for them.

use serde_json::{Value, json};
use stolon_vision::Tiling;

/// The tokens and the template of a random vision model's prompts.
pub(super) struct Prompts {
    /// The tokens that are not bytes, with the ids from [`FIRST_TOKEN`] on. The image token is the
    /// first.
    pub(super) tokens: Vec<String>,
    /// The chat template.
    pub(super) template: &'static str,
}

impl Prompts {
    /// The prompts of the model whose pictures are tiled in this way. Moondream has the tokens of
    /// SmolVLM, but does not use them.
    pub(super) fn of(tiling: &Tiling) -> Self {
        let names = |names: &[&str]| -> Vec<String> {
            names.iter().map(|name| (*name).to_owned()).collect()
        };
        match tiling {
            Tiling::Qwen3Vl(_) => Self {
                tokens: names(&[
                    "<|image_pad|>",
                    "<|vision_start|>",
                    "<|vision_end|>",
                    "<|im_start|>",
                    "<|im_end|>",
                ]),
                template: QWEN_TEMPLATE,
            },
            _ => {
                let mut tokens = names(&[
                    "<image>",
                    "<fake_token_around_image>",
                    "<global-img>",
                    "<end_of_utterance>",
                ]);
                let tiles = (1..=6)
                    .flat_map(|row| (1..=6).map(move |col| format!("<row_{row}_col_{col}>")));
                tokens.extend(tiles);
                Self { tokens, template: SMOLVLM_TEMPLATE }
            }
        }
    }

    /// A `tokenizer.json` whose tokens are the 256 bytes, with their values as ids, and the tokens
    /// that mark images.
    pub(super) fn tokenizer(&self) -> Value {
        let vocabulary: serde_json::Map<String, Value> =
            (0..=255).map(|byte: u8| (byte_char(byte).to_string(), Value::from(byte))).collect();
        let added: Vec<Value> = self
            .tokens
            .iter()
            .zip(FIRST_TOKEN..)
            .map(|(content, id)| {
                json!({
                    "id": id, "content": content, "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false, "special": true
                })
            })
            .collect();
        let bytes = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
        });
        json!({
            "version": "1.0",
            "added_tokens": added,
            "normalizer": null,
            "pre_tokenizer": bytes,
            "post_processor": null,
            "decoder": bytes,
            "model": { "type": "BPE", "vocab": vocabulary, "merges": [] }
        })
    }
}

/// The id of the first token that is not a byte.
const FIRST_TOKEN: usize = 256;

/// The character that represents a byte in the vocabulary of a byte-level tokenizer: the byte
/// itself if it is printable, and otherwise the next character from U+0100 on.
fn byte_char(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..);
    match is_printable(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|byte| !is_printable(*byte)).count();
            u32::try_from(before).ok().and_then(|n| char::from_u32(0x100 + n)).unwrap_or('?')
        }
    }
}

/// The chat template of SmolVLM, shortened.
const SMOLVLM_TEMPLATE: &str = "{% for message in messages %}\
{{ message['role'] | capitalize }}:\
{% if message['content'] is string %} {{ message['content'] }}\
{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<image>\
{% elif part['type'] == 'text' %} {{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<end_of_utterance>\n\
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}";

/// The chat template of Qwen3-VL, shortened.
const QWEN_TEMPLATE: &str = "{% for message in messages %}\
<|im_start|>{{ message['role'] }}\n\
{% if message['content'] is string %}{{ message['content'] }}\
{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>\n\
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
