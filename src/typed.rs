//! Answers and tools with Rust types: a JSON schema is derived from the type, and a grammar
//! restricts the model to it.

use std::fmt;
use std::sync::Arc;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use stolon_text::{FunctionSchema, Grammar, SchemaOptions};

use crate::{Completion, Engine, Error, Request};

/// The function of a tool: from the JSON of its arguments to the JSON of its result.
type Function = dyn Fn(&str) -> Result<String, serde_json::Error> + Send + Sync;

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
            reason: error.to_string(),
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

/// A Rust function that a model may call. Its arguments are the fields of a type.
///
/// ```
/// use stolon::Tool;
/// use stolon::schemars::JsonSchema;
///
/// #[derive(serde::Deserialize, JsonSchema)]
/// # #[schemars(crate = "stolon::schemars")]
/// struct Place {
///     city: String,
/// }
///
/// let tool = Tool::new("weather", "The weather in a city.", |place: Place| {
///     format!("sunny in {}", place.city)
/// });
/// assert_eq!(tool.call(r#"{"city": "Lima"}"#).unwrap(), r#""sunny in Lima""#);
/// ```
#[derive(Clone)]
pub struct Tool {
    schema: FunctionSchema,
    description: String,
    function: Arc<Function>,
}

impl Tool {
    /// A tool with a name of letters, digits, `_`, `-` and `.`. The description tells the model
    /// what the function does.
    pub fn new<A, R>(
        name: impl Into<String>,
        description: impl Into<String>,
        function: impl Fn(A) -> R + Send + Sync + 'static,
    ) -> Tool
    where
        A: DeserializeOwned + JsonSchema,
        R: Serialize,
    {
        let call = move |arguments: &str| {
            serde_json::to_string(&function(serde_json::from_str(arguments)?))
        };
        Tool {
            schema: FunctionSchema { name: name.into(), parameters: schema_of::<A>() },
            description: description.into(),
            function: Arc::new(call),
        }
    }

    /// Its name, and the schema of its arguments, as
    /// [`ToolCallGrammar`](crate::ToolCallGrammar) and [`AnswerFormat`](crate::AnswerFormat) take
    /// them.
    pub fn schema(&self) -> &FunctionSchema {
        &self.schema
    }

    /// Its definition in OpenAI's form, for [`Request::tools`].
    pub fn definition(&self) -> Value {
        let FunctionSchema { name, parameters } = &self.schema;
        let description = &self.description;
        let function = json!({"name": name, "description": description, "parameters": parameters});
        json!({"type": "function", "function": function})
    }

    /// Calls the function with the arguments of a [`ToolCall`](crate::ToolCall), a JSON object as a
    /// string. Returns its result as JSON.
    ///
    /// # Errors
    /// The arguments do not fit the function, or its result cannot be written as JSON.
    pub fn call(&self, arguments: &str) -> Result<String, serde_json::Error> {
        (self.function)(arguments)
    }
}

impl fmt::Debug for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tool").field("name", &self.schema.name).finish_non_exhaustive()
    }
}

/// The schema of a type, for a grammar.
fn schema_of<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().for_deserialize();
    let schema = settings.into_generator().into_root_schema_for::<T>();
    let options =
        SchemaOptions { strict: false, refuse_unsupported: false, additional_properties: false };
    options.apply(schema.to_value())
}
