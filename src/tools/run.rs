//! A conversation in which a model calls functions until it has an answer.

use futures::future::join_all;

use crate::{AnswerRules, ChatMessage, Completion, Engine, Error, Prompt, Request, Tool};

/// How a model came to its answer. The last of the completions is the answer.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ToolRun {
    /// What the model has generated, one completion for each time that it was asked; at least one.
    pub completions: Vec<Completion>,
    /// The messages that follow those of the request: answers with calls, the results of the calls,
    /// and the answer. With them the conversation can go on.
    pub messages: Vec<ChatMessage>,
}

impl ToolRun {
    /// The text of the answer, without reasoning.
    pub fn text(&self) -> &str {
        self.completions.last().map_or("", |completion| &completion.answer.text)
    }
}

impl Engine {
    /// Answers a conversation with a model that may call functions. Each time that it calls some,
    /// they run at the same time, and the model is asked again with their results. A function that
    /// fails does not end this: the model reads the error.
    ///
    /// Ends with the first answer without calls, with an answer that is cut off, and after
    /// `rounds` answers whose calls were executed. The calls of the last answer are not executed
    /// then: they are in [`Completion::answer`].
    ///
    /// Only what is new in each round is computed: what came before is in the prefix cache.
    ///
    /// ```no_run
    /// # #[cfg(feature = "schema")] mod agent {
    /// use stolon::schemars::JsonSchema;
    /// use stolon::{ChatMessage, Engine, Request, Tool};
    ///
    /// #[derive(serde::Deserialize, JsonSchema)]
    /// # #[schemars(crate = "stolon::schemars")]
    /// struct File {
    ///     path: String,
    /// }
    ///
    /// async fn agent(engine: Engine) -> Result<(), stolon::Error> {
    ///     let read = Tool::new_async("read", "Reads a file.", |file: File| {
    ///         tokio::fs::read_to_string(file.path)
    ///     });
    ///     let request = Request::chat([ChatMessage::user("What is in notes.txt?")]).max_tokens(400);
    ///     println!("{}", engine.run_tools(request, &[read], 8).await?.text());
    ///     Ok(())
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Engine::with_rules`] and [`Engine::complete`].
    pub async fn run_tools(
        &self,
        request: Request,
        tools: &[Tool],
        rounds: usize,
    ) -> Result<ToolRun, Error> {
        let Prompt::Chat(given) = request.prompt() else {
            return Err(Error::invalid("prompt", "a conversation", "another prompt"));
        };
        let rules = AnswerRules {
            tools: tools.iter().map(|tool| tool.spec().clone()).collect(),
            ..AnswerRules::default()
        };
        let mut run = ToolRun { completions: Vec::new(), messages: Vec::new() };
        let mut calls = 0;
        loop {
            let messages = given.iter().chain(&run.messages).cloned().collect();
            let asked = request.clone().with_messages(messages);
            let completion = self.complete(self.with_rules(asked, rules.clone()).await?).await?;
            let answer = &completion.answer;
            let is_last = answer.calls.is_empty()
                || completion.finish.reason.is_cut()
                || run.completions.len() >= rounds;
            // The templates of some models print the id, and the model reads the name in it.
            let numbered = answer.calls.iter().zip(calls..);
            let ids: Vec<String> = numbered
                .map(|(call, number)| format!("functions.{}:{number}", call.name))
                .collect();
            calls += ids.len();
            run.messages.push(ChatMessage::answer(answer, &ids));
            if !is_last {
                let results = join_all(answer.calls.iter().map(|call| result(tools, call)));
                let results = ids.iter().zip(&answer.calls).zip(results.await);
                run.messages.extend(
                    results.map(|((id, call), text)| ChatMessage::result(id, &call.name, text)),
                );
            }
            run.completions.push(completion);
            if is_last {
                return Ok(run);
            }
        }
    }
}

/// The result of a call, for the model.
async fn result(tools: &[Tool], call: &crate::ToolCall) -> String {
    match tools.iter().find(|tool| tool.spec().name == call.name) {
        Some(tool) => tool.call(&call.arguments).await.unwrap_or_else(|e| format!("Error: {e}")),
        None => format!("Error: there is no function {:?}", call.name),
    }
}
