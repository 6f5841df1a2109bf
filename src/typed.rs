//! Answers with Rust types: a JSON schema is derived from the type, and a grammar restricts the
//! model to it.

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::de::DeserializeOwned;
use serde_json::Value;
use stolon_text::{Grammar, SchemaOptions};

use crate::{Completion, Engine, Error, Request};

impl Request {
    /// Restricts the answer to the JSON of a `T`. It follows the schema of the type from its first
    /// token on, so that the model does not write reasoning before it. Rules that a schema cannot
    /// express, or that a grammar cannot enforce, are checked when the answer is read.
    ///
    /// Needs the feature `schema`.
    pub fn answer_of<T: JsonSchema>(self) -> Request {
        self.grammar(Grammar::JsonSchema(schema_of::<T>()))
    }
}

impl Completion {
    /// The answer to a request with [`Request::answer_of`].
    ///
    /// Needs the feature `schema`.
    ///
    /// # Errors
    /// [`Error::NotOfType`] if the answer was cut off by its length, or is not a `T` for a reason
    /// that its schema cannot express.
    pub fn value<T: DeserializeOwned>(&self) -> Result<T, Error> {
        serde_json::from_str(&self.text).map_err(|error| Error::NotOfType {
            reason: match self.finish.reason.is_cut() {
                true => format!("it was cut off after {} tokens", self.token_ids.len()),
                false => error.to_string(),
            },
            text: self.text.clone(),
        })
    }
}

impl Engine {
    /// Generates an answer of a Rust type.
    ///
    /// Needs the feature `schema`.
    ///
    /// ```no_run
    /// use stolon::schemars::JsonSchema;
    ///
    /// #[derive(serde::Deserialize, JsonSchema)]
    /// # #[schemars(crate = "stolon::schemars")]
    /// struct Weather {
    ///     city: String,
    ///     degrees: i32,
    /// }
    ///
    /// # async fn ask(engine: stolon::Engine) -> Result<(), stolon::Error> {
    /// let weather: Weather = engine.ask(stolon::Request::text("The weather, as JSON: ")).await?;
    /// println!("{} degrees in {}", weather.degrees, weather.city);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Engine::complete`] and [`Completion::value`].
    pub async fn ask<T: DeserializeOwned + JsonSchema>(
        &self,
        request: Request,
    ) -> Result<T, Error> {
        self.complete(request.answer_of::<T>()).await?.value()
    }
}

/// The schema of a type, for a grammar.
pub(crate) fn schema_of<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().for_deserialize();
    let schema = settings.into_generator().into_root_schema_for::<T>();
    let options =
        SchemaOptions { strict: false, refuse_unsupported: false, additional_properties: false };
    options.apply(schema.to_value())
}
