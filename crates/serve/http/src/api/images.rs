//! Images in requests.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// An image of a conversation, in OpenAI's form.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected an object with `url`, or a data URL")]
pub enum ImageUrl {
    /// The URL.
    Url(String),
    /// An object with the URL.
    Object {
        /// A data URL in base64: `data:image/png;base64,..`. Other URLs are fetched only from hosts
        /// that the server's operator has named.
        url: String,
        /// Without effect: the size in which an image is shown to the model follows from its
        /// processor.
        #[serde(skip_serializing)]
        detail: Option<Value>,
    },
}

/// An image of a conversation, in Anthropic's form.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum ImageSource {
    /// The content of a file.
    Base64 {
        /// The type of the file, `image/png` for example.
        media_type: String,
        /// The file in base64.
        data: String,
    },
    /// A URL.
    Url {
        /// A data URL in base64. Other URLs are fetched only from hosts that the server's operator
        /// has named.
        url: String,
    },
}

impl ImageSource {
    /// The part of a message with this image.
    pub(crate) fn into_part(self) -> Value {
        image_part(&match self {
            Self::Base64 { media_type, data } => format!("data:{media_type};base64,{data}"),
            Self::Url { url } => url,
        })
    }
}

/// The part of a message with the image of a URL.
pub(crate) fn image_part(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}
