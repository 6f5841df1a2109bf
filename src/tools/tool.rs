//! Functions of a program that a model may call.

use std::fmt::{self, Display};
use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::ToolSpec;

/// From the arguments of a call to its result, or to the text of an error.
type Function = dyn Fn(&str) -> BoxFuture<'static, Result<String, String>> + Send + Sync;

/// What a [`Tool`] returns: a text for the model, JSON, nothing, or a [`Result`] with one of these.
///
/// The model reads a text as it is and an error as its message. A value of a type of your own is
/// returned as `serde_json::json!(value)`.
pub trait ToolOutput {
    /// The text for the model.
    ///
    /// # Errors
    /// The text of an error for the model.
    fn into_text(self) -> Result<String, String>;
}

impl ToolOutput for String {
    fn into_text(self) -> Result<String, String> {
        Ok(self)
    }
}

impl ToolOutput for &str {
    fn into_text(self) -> Result<String, String> {
        Ok(self.to_owned())
    }
}

impl ToolOutput for Value {
    fn into_text(self) -> Result<String, String> {
        Ok(self.to_string())
    }
}

impl ToolOutput for () {
    fn into_text(self) -> Result<String, String> {
        Ok("done".to_owned())
    }
}

impl<T: ToolOutput, E: Display> ToolOutput for Result<T, E> {
    fn into_text(self) -> Result<String, String> {
        self.map_err(|error| error.to_string())?.into_text()
    }
}

/// A function that a model may call, with [`Engine::run_tools`](crate::Engine::run_tools).
///
/// ```
/// # #[cfg(feature = "schema")] {
/// use stolon::Tool;
/// use stolon::schemars::JsonSchema;
///
/// #[derive(serde::Deserialize, JsonSchema)]
/// # #[schemars(crate = "stolon::schemars")]
/// struct Place {
///     /// A city and its country.
///     city: String,
/// }
///
/// let tool = Tool::new("weather", "The weather in a city.", |place: Place| {
///     match place.city.as_str() {
///         "Lima, Peru" => Ok("sunny"),
///         other => Err(format!("there is no city {other:?}")),
///     }
/// });
/// # drop(tool);
/// # }
/// ```
#[derive(Clone)]
pub struct Tool {
    spec: ToolSpec,
    function: Arc<Function>,
}

impl Tool {
    /// A function whose arguments are the fields of a type. Calls that the model guesses wrong are
    /// answered with what is wrong about them. `function` blocks the task that runs it; give slow
    /// ones to [`Tool::new_async`].
    ///
    /// Needs the feature `schema`.
    #[cfg(feature = "schema")]
    pub fn new<A, R>(
        name: impl Into<String>,
        description: impl Into<String>,
        function: impl Fn(A) -> R + Send + Sync + 'static,
    ) -> Tool
    where
        A: DeserializeOwned + JsonSchema,
        R: ToolOutput,
    {
        let spec = spec_of::<A>(name.into(), description.into());
        let text = move |arguments| function(arguments).into_text();
        Tool::with(spec, move |arguments| std::future::ready(parsed(arguments).and_then(&text)))
    }

    /// An async function whose arguments are the fields of a type.
    ///
    /// Needs the feature `schema`.
    #[cfg(feature = "schema")]
    pub fn new_async<A, R, F>(
        name: impl Into<String>,
        description: impl Into<String>,
        function: impl Fn(A) -> F + Send + Sync + 'static,
    ) -> Tool
    where
        A: DeserializeOwned + JsonSchema,
        R: ToolOutput + Send,
        F: Future<Output = R> + Send + 'static,
    {
        Tool::from_spec(spec_of::<A>(name.into(), description.into()), function)
    }

    /// An async function with a schema that is known only when the program runs. Its arguments are
    /// an `A`: `serde_json::Value`, for example.
    pub fn from_spec<A, R, F>(
        spec: ToolSpec,
        function: impl Fn(A) -> F + Send + Sync + 'static,
    ) -> Tool
    where
        A: DeserializeOwned,
        R: ToolOutput + Send,
        F: Future<Output = R> + Send + 'static,
    {
        Tool::with(spec, move |arguments| {
            let result = parsed(arguments).map(&function);
            async move { result?.await.into_text() }
        })
    }

    fn with<F>(spec: ToolSpec, function: impl Fn(&str) -> F + Send + Sync + 'static) -> Tool
    where
        F: Future<Output = Result<String, String>> + Send + 'static,
    {
        Tool { spec, function: Arc::new(move |arguments| function(arguments).boxed()) }
    }

    /// What the model is told about the function.
    pub fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    /// Calls the function with the arguments of a [`ToolCall`](crate::ToolCall), a JSON object as a
    /// string. Returns the text for the model.
    ///
    /// # Errors
    /// The text of an error for the model: what the function has returned, or why the arguments do
    /// not fit it.
    pub async fn call(&self, arguments: &str) -> Result<String, String> {
        (self.function)(arguments).await
    }
}

impl fmt::Debug for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tool").field("name", &self.spec.name).finish_non_exhaustive()
    }
}

fn parsed<A: DeserializeOwned>(arguments: &str) -> Result<A, String> {
    serde_json::from_str(arguments).map_err(|error| format!("the arguments are wrong: {error}"))
}

#[cfg(feature = "schema")]
fn spec_of<A: JsonSchema>(name: String, description: String) -> ToolSpec {
    let description = Some(description);
    ToolSpec { description, ..ToolSpec::new(name, crate::typed::schema_of::<A>()) }
}
