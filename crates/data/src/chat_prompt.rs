//! Messages as prompts of a chat template.

use minijinja::{Value, context};

use crate::DataError;
use crate::chat::{ChatError, ChatTemplate, Part};
use crate::document::json;

/// The content of an answer that is rendered to locate it: a noncharacter that marks no part.
const ANSWER: char = '\u{fdef}';

/// A chat template for generation.
#[derive(Debug)]
pub struct ChatPrompts(ChatTemplate);

/// A message as the prompt of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatPrompt {
    /// The text before the answer, with all tokens of the template.
    pub text: String,
    /// What the template adds to an answer, such as the name of a token.
    pub end: String,
    /// What the template writes from the end of an answer to the content of the user's next message.
    pub next: String,
}

impl ChatPrompts {
    /// Parses a template. `special_names` are the names of the tokens at the start and the end of a text, as
    /// [`Tokenizer::special_names`](crate::Tokenizer::special_names) returns them.
    ///
    /// # Errors
    ///
    /// [`DataError::Template`] if it is not a template.
    pub fn new(template: &str, special_names: [String; 2]) -> Result<Self, DataError> {
        let template = ChatTemplate::new(template, special_names);
        Ok(Self(template.map_err(template_error)?))
    }

    /// Renders a user's message. The text is the part that training does not learn, before the first answer of a chat.
    ///
    /// # Errors
    ///
    /// [`DataError::Template`] if the template refuses the message.
    pub fn prompt(&self, message: &str) -> Result<ChatPrompt, DataError> {
        let user = |content: &str| context! { role => "user", content };
        let answer = context! { role => "assistant", content => ANSWER.to_string() };
        let first = user(message);
        let render = |messages: &[Value]| self.0.render(&json(&messages.iter().cloned().collect()));
        let (text, whole) = match render(&[first.clone(), answer.clone()]) {
            Ok(parts) => {
                let before = parts.iter().take_while(|(_, is_learned)| !is_learned);
                (joined(before), joined(parts.iter()))
            }
            // The answer cannot be located, but the template has a prompt for it.
            Err(ChatError::NoMask(_)) if !self.0.is_marked => {
                let both = [first.clone(), answer.clone()];
                let text = self.0.text(&both[..1], true).map_err(chat_error)?;
                (text, self.0.text(&both, false).map_err(chat_error)?)
            }
            Err(error) => return Err(chat_error(error)),
        };
        let end = whole.rsplit_once(ANSWER).map(|(_, end)| end.to_owned());
        let next = render(&[first, answer, user(&ANSWER.to_string())]);
        let next = next.map(|parts| joined(parts.iter())).unwrap_or_default();
        let next = next.rsplit_once(ANSWER).map(|(before, _)| before);
        let next = next.and_then(|before| before.rsplit_once(ANSWER));
        Ok(ChatPrompt {
            text,
            end: end.unwrap_or_default(),
            next: next.map(|(_, next)| next.to_owned()).unwrap_or_default(),
        })
    }
}

fn joined<'a>(parts: impl Iterator<Item = &'a Part>) -> String {
    parts.map(|(text, _)| text.as_str()).collect()
}

fn template_error(problem: String) -> DataError {
    DataError::Template { problem }
}

fn chat_error(error: ChatError) -> DataError {
    match error {
        ChatError::Template(problem) => template_error(problem),
        ChatError::Render(problem) | ChatError::NoMask(problem) => {
            template_error(format!("cannot render the message: {problem}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::tests::{MARKED, PLAIN};

    #[test]
    fn a_message_is_a_prompt_with_an_end() {
        let prompt = |template: &str| {
            let prompts = ChatPrompts::new(template, ["<s>", "</s>"].map(str::to_owned));
            let prompts = prompts.expect("it is a template");
            let ChatPrompt { text, end, next } = prompts.prompt("Hi\n").expect("it renders");
            [text, end, next]
        };
        assert_eq!(
            prompt(PLAIN),
            [
                "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
                "<|im_end|>\n",
                "<|im_end|>\n<|im_start|>user\n",
            ]
        );
        assert_eq!(prompt(MARKED), ["<s><u>Hi\n\n<a>", "</s>", "</s><u>"]);
        const ROLES: &str =
            "{% for m in messages %}{{ m.role|capitalize }}: {{ m.content|trim }}\n{% endfor %}";
        assert_eq!(prompt(ROLES), ["User: Hi\nAssistant:", "\n", "\nUser: "]);
        // The answer is not what the prompt continues with.
        const THOUGHT: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</e>{% endfor %}\
            {% if add_generation_prompt %}[assistant]<think>{% endif %}";
        let [text, end, _] = prompt(THOUGHT);
        assert_eq!([text, end], ["[user]Hi\n</e>[assistant]<think>", "</e>"]);
        let refuses = "{{ raise_exception('no users') }}";
        let refuses = ChatPrompts::new(refuses, Default::default()).expect("it is a template");
        let problem = refuses.prompt("Hi").expect_err("it must fail").to_string();
        assert!(problem.contains("no users"), "{problem}");
    }
}
