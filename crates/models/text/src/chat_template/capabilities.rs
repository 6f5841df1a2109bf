//! The capabilities of a chat template, found out by rendering small conversations with it.
//!
//! Templates differ in the conversations that they take: some want roles that alternate, some lose
//! a system message in the middle without a word, some read content that is not there. The changes
//! of [`history`](super::history) in a conversation depend on these facts about the template alone
//! and not on the conversation as a whole. So the same old messages become the same text in every
//! later turn, and the prefix cache finds them.

use serde_json::{Value, json};

use super::messages;

/// The beginning of the texts of probes, which no template contains.
const MARK: &str = "5tolon pr0be";

/// The kinds of messages that a template can show. If all of this is true, conversations are
/// rendered unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Capabilities {
    /// Content that is a list of parts.
    pub(super) parts: bool,
    /// Content that is one text.
    pub(super) strings: bool,
    /// Roles whose content may be several parts of text. For others, some templates show the first
    /// part only, or the list as Python prints it.
    pub(super) several_parts: Roles,
    /// A conversation without tools, with `none` as their list. Otherwise the list is empty.
    pub(super) no_tools: bool,
    /// A system message in front.
    pub(super) system: bool,
    /// Several system messages in front.
    pub(super) systems: bool,
    /// System messages between the others, in their places.
    pub(super) system_between: bool,
    /// Several messages of the user in a row.
    pub(super) user_runs: bool,
    /// Several messages of the assistant in a row.
    pub(super) assistant_runs: bool,
    /// A conversation that begins with a message of the assistant.
    pub(super) assistant_first: bool,
    /// A message of the assistant whose text is empty.
    pub(super) empty_answers: bool,
    /// Calls of the assistant.
    pub(super) calls: bool,
    /// The content of a message that has calls and no text.
    pub(super) call_content: CallContent,
    /// The arguments of a call as an object. Otherwise they are JSON as a string.
    pub(super) object_arguments: bool,
    /// Ids of calls of any form. Otherwise they have nine letters and digits, as Mistral's.
    pub(super) any_ids: bool,
    /// Several calls in one message.
    pub(super) several_calls: bool,
    /// Calls without a result.
    pub(super) unanswered_calls: bool,
    /// Messages with the role `tool`, after a call.
    pub(super) results: bool,
    /// Results that follow no call.
    pub(super) orphans: bool,
    /// A message of the user directly after a result.
    pub(super) user_after_result: bool,
}

/// A set of roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Roles {
    system: bool,
    user: bool,
    assistant: bool,
    tool: bool,
}

impl Roles {
    const ALL: Self = Self { system: true, user: true, assistant: true, tool: true };

    pub(super) fn contains(self, role: &str) -> bool {
        match role {
            "system" | "developer" => self.system,
            "assistant" => self.assistant,
            "tool" => self.tool,
            _ => self.user,
        }
    }
}

/// The values that the content of a message without text may have, so that its calls are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallContent {
    /// `none` and the empty string.
    Any,
    /// Only `none`.
    Null,
    /// Only the empty string.
    Empty,
}

/// A message of a probe.
#[derive(Clone, Copy, Debug)]
enum Turn {
    System,
    User,
    Assistant,
    /// A message of the assistant without text.
    Silent,
    /// A message of the assistant with this many calls.
    Calls(usize),
    /// The result of the call with this number.
    Result(usize),
}

use Turn::{Assistant, Calls, Result as Answer, Silent, System, User};

/// Renders messages with tools. `None` if the template fails.
pub(super) trait Render: Fn(&[Value], &[Value], &Capabilities) -> Option<String> {}

impl<F: Fn(&[Value], &[Value], &Capabilities) -> Option<String>> Render for F {}

impl Capabilities {
    /// Everything, with content that is a text.
    const ALL: Self = Self {
        parts: false,
        strings: true,
        several_parts: Roles::ALL,
        no_tools: true,
        system: true,
        systems: true,
        system_between: true,
        user_runs: true,
        assistant_runs: true,
        assistant_first: true,
        empty_answers: true,
        calls: true,
        call_content: CallContent::Any,
        object_arguments: true,
        any_ids: true,
        several_calls: true,
        unanswered_calls: true,
        results: true,
        orphans: true,
        user_after_result: true,
    };

    /// Finds out the capabilities of a template.
    pub(super) fn probe(render: impl Render) -> Self {
        let mut can = Self::ALL;
        can.find_forms(&render);
        if !can.shows(&render, &[User, Assistant, User]) {
            // Nothing is known about it. Conversations are rendered unchanged.
            return can;
        }
        let all = can;
        can.system = all.shows(&render, &[System, User]);
        can.systems = can.system && all.shows(&render, &[System, System, User]);
        can.system_between = all.shows(&render, &[User, Assistant, User, System, Assistant, User]);
        can.user_runs = all.shows(&render, &[User, User, Assistant, User]);
        can.assistant_runs = all.shows(&render, &[User, Assistant, Assistant, User]);
        can.assistant_first = all.shows(&render, &[Assistant, User]);
        can.empty_answers = all.shows(&render, &[User, Silent, User]);
        can.find_calls(&render);
        let call = if can.calls { Calls(1) } else { Assistant };
        if can.parts {
            can.several_parts = Roles {
                system: !can.system || can.shows_parts(&render, &[System, User], 0),
                user: can.shows_parts(&render, &[User, Assistant, User], 0),
                assistant: can.shows_parts(&render, &[User, Assistant, User], 1),
                tool: !can.results
                    || can.shows_parts(&render, &[User, call, Answer(0), Assistant, User], 2),
            };
        }
        can.several_calls = can.calls
            && can.shows(&render, &[User, Calls(2), Answer(0), Answer(1), Assistant, User]);
        can.unanswered_calls =
            can.calls && can.shows(&render, &[User, call, User, Assistant, User]);
        can.user_after_result = can.shows(&render, &[User, call, Answer(0), User, Assistant, User]);
        can.orphans = can.results && can.shows(&render, &[User, Answer(0), Assistant, User]);
        if can.results {
            can.system_between &= can.shows(&render, &[User, call, Answer(0), System, Assistant]);
        }
        can
    }

    /// The minimal capabilities of a template with these forms of content. `calls` tells whether it
    /// gets calls and results at all.
    pub(super) fn least(self, calls: bool) -> Self {
        let call_content = match self.call_content {
            CallContent::Any => CallContent::Empty,
            only => only,
        };
        Self {
            systems: false,
            system_between: false,
            user_runs: false,
            assistant_runs: false,
            assistant_first: false,
            empty_answers: false,
            calls: calls && self.calls,
            call_content,
            any_ids: false,
            several_calls: false,
            unanswered_calls: false,
            results: calls && self.results,
            orphans: false,
            user_after_result: false,
            ..self
        }
    }

    /// Which forms of content the template supports, and whether it needs a list of tools.
    fn find_forms(&mut self, render: &impl Render) {
        for no_tools in [true, false] {
            self.no_tools = no_tools;
            let text = json!(MARK);
            let part = json!([{"type": "text", "text": MARK, "5tolon_type": 1}]);
            // A template that does not support parts prints the whole list, including the types.
            let shows = |content: Value| {
                let message = json!({"role": "user", "content": content});
                let text = render(&[message], &[], self);
                text.is_some_and(|text| text.contains(MARK) && !text.contains("5tolon_type"))
            };
            let (strings, parts) = (shows(text), shows(part));
            if strings || parts {
                (self.strings, self.parts) = (strings, parts);
                return;
            }
        }
        // The template needs more than one message. Strings are the common form.
        self.no_tools = true;
    }

    /// Whether calls and results are shown, and in which form.
    fn find_calls(&mut self, render: &impl Render) {
        let mut best = None;
        for (any_ids, object_arguments) in
            [(true, true), (true, false), (false, true), (false, false)]
        {
            let form = Self { any_ids, object_arguments, ..*self };
            let shown = |call_content| {
                let form = Self { call_content, ..form };
                form.shown_of_call(render)
            };
            let (null, empty) = (shown(CallContent::Null), shown(CallContent::Empty));
            let call_content = match null.cmp(&empty) {
                std::cmp::Ordering::Equal => CallContent::Any,
                std::cmp::Ordering::Greater => CallContent::Null,
                std::cmp::Ordering::Less => CallContent::Empty,
            };
            let shown = null.max(empty);
            if best.is_none_or(|(of_best, _)| shown > of_best) {
                best = Some((shown, Self { call_content, ..form }));
            }
        }
        if let Some(((calls, results), form)) = best {
            let natural = Self { any_ids: true, object_arguments: true, ..*self };
            *self = if calls { form } else { natural };
            (self.calls, self.results) = (calls, calls && results);
        }
        if !self.calls {
            self.call_content = CallContent::Any;
            self.results = self.shows(render, &[User, Assistant, Answer(0), Assistant, User]);
        }
    }

    /// Whether a call is shown, and its result.
    fn shown_of_call(&self, render: &impl Render) -> (bool, bool) {
        let (messages, marks) = self.conversation(&[User, Calls(1), Answer(0), Assistant, User]);
        let Some(text) = render(&messages, &[tool()], self) else { return (false, false) };
        let shown = |mark: &String| text.contains(mark.as_str()) && !text.contains("None");
        (shown(&marks[1]), shown(&marks[1]) && shown(&marks[2]))
    }

    /// Whether the template shows all texts of a conversation, in their order.
    fn shows(&self, render: &impl Render, turns: &[Turn]) -> bool {
        let (messages, marks) = self.conversation(turns);
        let text = render(&messages, &tools_of(turns), self);
        text.is_some_and(|text| has_in_order(&text, &marks))
    }

    /// Whether the template shows all texts if the content of the message at `index` is two parts.
    /// Each turn up to it has one text.
    fn shows_parts(&self, render: &impl Render, turns: &[Turn], index: usize) -> bool {
        let (mut messages, mut marks) = self.conversation(turns);
        marks.insert(index + 1, format!("{MARK} second."));
        let part = |text: &String| json!({"type": "text", "text": text, "5tolon_type": 1});
        messages[index]["content"] = marks[index..=index + 1].iter().map(part).collect();
        let text = render(&messages, &tools_of(turns), self);
        text.is_some_and(|text| has_in_order(&text, &marks) && !text.contains("5tolon_type"))
    }

    /// The messages of a probe, and their texts.
    fn conversation(&self, turns: &[Turn]) -> (Vec<Value>, Vec<String>) {
        let mut marks: Vec<String> = Vec::new();
        let mut mark = || {
            marks.push(format!("{MARK} {}.", marks.len()));
            marks[marks.len() - 1].clone()
        };
        let id = |number: usize| match self.any_ids {
            true => format!("call_5tolon_{number}"),
            false => format!("5tolonId{number}"),
        };
        let say = |role: &str, text: String| json!({"role": role, "content": self.content(text)});
        let messages = turns
            .iter()
            .map(|turn| match turn {
                System => say("system", mark()),
                User => say("user", mark()),
                Assistant => say("assistant", mark()),
                Silent => say("assistant", String::new()),
                Calls(count) => {
                    let calls = (0..*count).map(|number| {
                        let arguments = json!({ARGUMENT: mark()});
                        let arguments = match self.object_arguments {
                            true => arguments,
                            false => arguments.to_string().into(),
                        };
                        let function = json!({"name": FUNCTION, "arguments": arguments});
                        json!({"id": id(number), "type": "function", "function": function})
                    });
                    let calls: Vec<Value> = calls.collect();
                    let content = match self.call_content {
                        CallContent::Null => Value::Null,
                        CallContent::Any | CallContent::Empty => self.content(String::new()),
                    };
                    json!({"role": "assistant", "content": content, "tool_calls": calls})
                }
                Answer(number) => {
                    let mut result = say("tool", mark());
                    result["tool_call_id"] = id(*number).into();
                    result
                }
            })
            .collect();
        (messages, marks)
    }

    /// A text as content in a form that the template supports.
    pub(super) fn content(&self, text: String) -> Value {
        messages::content(text, self.strings)
    }
}

/// The tools of a conversation with calls.
fn tools_of(turns: &[Turn]) -> Vec<Value> {
    let has_calls = turns.iter().any(|turn| matches!(turn, Calls(_) | Answer(_)));
    if has_calls { vec![tool()] } else { Vec::new() }
}

/// Whether a text contains all marks, one after the other.
fn has_in_order(text: &str, marks: &[String]) -> bool {
    let mut rest = text;
    marks.iter().all(|mark| match rest.split_once(mark.as_str()) {
        Some((_, after)) => {
            rest = after;
            true
        }
        None => false,
    })
}

/// The function and the argument of the calls of probes.
const FUNCTION: &str = "probe";
const ARGUMENT: &str = "text";

fn tool() -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {ARGUMENT: {"type": "string", "description": "A text"}},
        "required": [ARGUMENT],
    });
    let function = json!({"name": FUNCTION, "description": "A tool", "parameters": parameters});
    json!({"type": "function", "function": function})
}
