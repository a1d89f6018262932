//! Chat templates in Jinja, and the parts of a rendered chat that the assistant wrote.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use minijinja::{Environment, Error, ErrorKind, Value, context};
use parking_lot::Mutex;

use crate::document::member;
use crate::json::to_json;
use crate::python::{method, round, to_text, write_python};

const NAME: &str = "chat";

/// Unicode's noncharacters, of which a pair encloses the assistant's parts while a chat is rendered.
const MARKS: std::ops::Range<u32> = 0xfdd0..0xfdf0;

/// A chat template.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    special: [String; 2],
    /// True if the template marks what the assistant writes.
    pub(crate) is_marked: bool,
    /// The first of the two marks for the current document.
    mark: Arc<AtomicU32>,
    /// Held while a marked chat is rendered, because all streams of a data set share the mark.
    rendering: Mutex<()>,
}

/// A part of a rendered chat, and whether it is learned.
pub(crate) type Part = (String, bool);

/// A reason why a chat was not rendered.
#[derive(Debug)]
pub(crate) enum ChatError {
    /// The template needs something that does not exist here, for any messages.
    Template(String),
    Render(String),
    NoMask(String),
}

impl ChatTemplate {
    /// Parses a template. `special` are the names of the tokens at the start and the end of a text.
    pub(crate) fn new(source: &str, special: [String; 2]) -> Result<Self, String> {
        // As Jinja does.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let (source, is_marked) = with_filters(&source);
        let mark = Arc::new(AtomicU32::new(MARKS.start));
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(method);
        environment.set_formatter(write_python);
        environment.add_filter("string", to_text);
        environment.add_filter("tojson", to_json);
        environment.add_filter("round", round);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<String, Error> {
                Err(Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        let current = Arc::clone(&mark);
        environment.add_filter("assistant_tokens", move |text: String| {
            let [open, close] = marks(current.load(Ordering::Relaxed));
            format!("{open}{text}{close}")
        });
        let added = environment.add_template_owned(NAME, source);
        added.map_err(|error| format!("cannot be parsed: {error:#}"))?;
        Ok(Self {
            environment,
            special,
            is_marked,
            mark,
            rendering: Mutex::new(()),
        })
    }

    /// Renders messages, as JSON.
    pub(crate) fn render(&self, messages: &str) -> Result<Vec<Part>, ChatError> {
        let parsed = serde_json::from_str(messages);
        let messages_json: Vec<Value> =
            parsed.map_err(|error| ChatError::Render(error.to_string()))?;
        if !self.is_marked {
            return self.by_prefixes(&messages_json);
        }
        let mut first = MARKS.step_by(2);
        let free = first.find(|first| marks(*first).iter().all(|mark| !messages.contains(*mark)));
        let free = free.ok_or_else(|| {
            ChatError::NoMask(
                "the messages contain all Unicode noncharacters that could mark it".to_owned(),
            )
        })?;
        let _guard = self.rendering.lock();
        self.mark.store(free, Ordering::Relaxed);
        let text = self.text(&messages_json, false)?;
        split_at_marks(&text, marks(free)).map_err(ChatError::NoMask)
    }

    pub(crate) fn text(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
    ) -> Result<String, ChatError> {
        let template = self.environment.get_template(NAME);
        // A token that does not exist is undefined in transformers, too.
        let special = self.special.each_ref().map(|name| match name.as_str() {
            "" => Value::UNDEFINED,
            name => Value::from(name),
        });
        let [bos_token, eos_token] = special;
        let none = Value::from(());
        let context = context! {
            messages, add_generation_prompt, bos_token, eos_token, tools => none, documents => none
        };
        let text = template.and_then(|template| template.render(context));
        text.map_err(|error| match error.kind() {
            ErrorKind::UnknownFunction
            | ErrorKind::UnknownFilter
            | ErrorKind::UnknownTest
            | ErrorKind::UnknownMethod => {
                ChatError::Template(format!("needs something that this program lacks: {error}"))
            }
            _ => ChatError::Render(error.to_string()),
        })
    }

    /// Returns the place in `text` where the content of the last of its messages starts: the place of a mark before the
    /// content. Returns `None` if the mark changes the text, or if the content is not a text.
    fn start_of_last(&self, messages: &[Value], text: &str) -> Result<Option<usize>, ChatError> {
        let [mark, _] = marks(MARKS.start);
        let Some((last, before)) = messages.split_last() else {
            return Ok(None);
        };
        let content = member(last, "content").filter(|_| !text.contains(mark));
        let Some(content) = content.as_ref().and_then(Value::as_str) else {
            return Ok(None);
        };
        // Many templates remove white space around a content, but none after a mark.
        for content in [content, content.trim_start()] {
            let marked = with_content(last, format!("{mark}{content}"));
            let marked = self.text(&[before, &[marked]].concat(), false)?;
            if let Some(start) = marked.find(mark)
                && marked.replace(mark, "") == text
            {
                return Ok(Some(start));
            }
        }
        Ok(None)
    }

    /// Finds the assistant's parts of an unmarked template: what a message adds to the prompt that precedes it.
    fn by_prefixes(&self, messages: &[Value]) -> Result<Vec<Part>, ChatError> {
        let full = self.text(messages, false)?;
        let (mut parts, mut end) = (Vec::new(), 0);
        for (index, message) in messages.iter().enumerate() {
            let role = member(message, "role");
            if role.as_ref().and_then(Value::as_str) != Some("assistant") {
                continue;
            }
            let prompt = self.text(&messages[..index], true)?;
            let answered = self.text(&messages[..=index], false)?;
            let is_prefix =
                prompt.len() >= end && answered.starts_with(&prompt) && full.starts_with(&answered);
            if !is_prefix {
                return Err(ChatError::NoMask(format!(
                    "the chat up to message {index} does not begin with the prompt before it, so the answer cannot be located"
                )));
            }
            // If the template has no prompt for an answer, its name of the role may precede the answer.
            let ignores_prompt = prompt == self.text(&messages[..index], false)?;
            let found = if ignores_prompt {
                self.start_of_last(&messages[..=index], &answered)?
            } else {
                None
            };
            // Spaces stay with the answer, because tokens of words begin with one.
            let header = found.and_then(|start| answered.get(prompt.len()..start));
            let header = header.unwrap_or_default().trim_end_matches(' ');
            let start = prompt.len() + header.len();
            parts.push((full[end..start].to_owned(), false));
            parts.push((answered[start..].to_owned(), true));
            end = answered.len();
        }
        parts.push((full[end..].to_owned(), false));
        parts.retain(|(text, _)| !text.is_empty());
        Ok(parts)
    }
}

/// Returns a message with another content.
fn with_content(message: &Value, content: String) -> Value {
    let keys = message.try_iter().into_iter().flatten();
    let entries = keys.map(|key| {
        let value = if key.as_str() == Some("content") {
            Value::from(content.as_str())
        } else {
            message.get_item(&key).unwrap_or_default()
        };
        (key, value)
    });
    entries.collect()
}

/// Replaces `{% generation %}` blocks, which only transformers knows, by filters. A filter is a block with the same
/// scope and white space. Returns true if there is one.
fn with_filters(source: &str) -> (String, bool) {
    let (mut text, mut rest, mut is_marked) = (String::new(), source, false);
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        text.push_str(before);
        let Some(len) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (inner, after) = tag.split_at(len);
        let word = inner.trim_matches(['-', '+', ' ', '\t', '\n', '\r']);
        let replaced = match word {
            "generation" => inner.replace(word, "filter assistant_tokens"),
            "endgeneration" => inner.replace(word, "endfilter"),
            _ => inner.to_owned(),
        };
        is_marked |= word == "generation";
        text.push_str(&replaced);
        rest = after;
    }
    text.push_str(rest);
    (text, is_marked)
}

fn marks(first: u32) -> [char; 2] {
    [first, first + 1].map(|mark| char::from_u32(mark).unwrap_or(char::REPLACEMENT_CHARACTER))
}

fn split_at_marks(text: &str, [open, close]: [char; 2]) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    let (mut is_learned, mut start) = (false, 0);
    for (index, mark) in text.match_indices([open, close]) {
        if mark.starts_with(open) == is_learned {
            return Err("its `generation` blocks are nested or incomplete".to_owned());
        }
        parts.push((text[start..index].to_owned(), is_learned));
        is_learned = !is_learned;
        start = index + mark.len();
    }
    parts.push((text[start..].to_owned(), false));
    parts.retain(|(text, _)| !text.is_empty());
    Ok(parts)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const CHAT: &str = r#"[{"role":"user","content":"Hi\n"},{"role":"assistant","content":"a"},{"role":"user","content":"b"},{"role":"assistant","content":"c"}]"#;

    pub(crate) const PLAIN: &str = "{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message['content'].strip() + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}";

    pub(crate) const MARKED: &str = "{{ bos_token }}{% for message in messages %}
{% if message.role == 'assistant' %}
<a>{% generation %}{{ message.content }}{{ eos_token }}{%- endgeneration -%}
{% else %}
<u>{{ message.content }}
{% endif %}
{% endfor %}";

    fn rendered(template: &str, messages: &str) -> Vec<Part> {
        let special = ["<s>", "</s>"].map(str::to_owned);
        let template = ChatTemplate::new(template, special).expect("it is a template");
        template.render(messages).expect("it renders")
    }

    fn parts(expected: &[(&str, bool)]) -> Vec<Part> {
        expected
            .iter()
            .map(|(text, is_learned)| ((*text).to_owned(), *is_learned))
            .collect()
    }

    #[test]
    fn unmarked_templates_are_divided_by_their_prompts() {
        let expected = parts(&[
            (
                "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
                false,
            ),
            ("a<|im_end|>\n", true),
            (
                "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n",
                false,
            ),
            ("c<|im_end|>\n", true),
        ]);
        assert_eq!(rendered(PLAIN, CHAT), expected);
    }

    #[test]
    fn a_role_before_an_answer_is_not_learned() {
        const ROLES: &str =
            "{% for m in messages %}{{ m.role|capitalize }}: {{ m.content|trim }}\n{% endfor %}";
        let expected = parts(&[
            ("User: Hi\nAssistant:", false),
            (" a\n", true),
            ("User: b\nAssistant:", false),
            (" c\n", true),
        ]);
        assert_eq!(rendered(ROLES, CHAT), expected);
        let padded = CHAT.replace("\"a\"", "\"  a \"");
        assert_ne!(padded, CHAT);
        assert_eq!(rendered(ROLES, &padded), expected);
        // Without a role, the space belongs to the answer.
        const BRACKETS: &str = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
            {% else %} {{ m.content }} </s>{% endif %}{% endfor %}";
        let expected = parts(&[
            ("[INST] Hi\n [/INST]", false),
            (" a </s>", true),
            ("[INST] b [/INST]", false),
            (" c </s>", true),
        ]);
        assert_eq!(rendered(BRACKETS, CHAT), expected);
    }

    #[test]
    fn marked_templates_are_divided_by_their_blocks() {
        let expected = parts(&[
            ("<s><u>Hi\n\n<a>", false),
            ("a</s>", true),
            ("<u>b\n<a>", false),
            ("c</s>", true),
        ]);
        assert_eq!(rendered(MARKED, CHAT), expected);
    }

    #[test]
    fn noncharacters_in_messages_do_not_mark_anything() {
        let messages = CHAT.replace("Hi", "\u{fdd1}\u{fdd0}");
        let found = rendered(MARKED, &messages);
        assert_eq!(
            found[0],
            ("<s><u>\u{fdd1}\u{fdd0}\n\n<a>".to_owned(), false)
        );
        assert_eq!(found.len(), 4);
    }

    #[test]
    fn streams_on_several_threads_do_not_mix_their_marks() {
        let template = ChatTemplate::new(MARKED, Default::default()).expect("it is a template");
        let other = CHAT.replace("Hi", "\u{fdd0}");
        std::thread::scope(|scope| {
            for messages in [CHAT, &other] {
                let template = &template;
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        let parts = template.render(messages).expect("it renders");
                        let learned = parts.into_iter().filter(|(_, is_learned)| *is_learned);
                        let learned: Vec<String> = learned.map(|(text, _)| text).collect();
                        assert_eq!(learned, ["a", "c"]);
                    }
                });
            }
        });
    }

    #[test]
    fn json_has_pythons_spaces() {
        let found = rendered(
            "{{ messages[0]|tojson }}",
            r#"[{"role":"user","content":["<é>",1]}]"#,
        );
        assert_eq!(
            found,
            parts(&[(r#"{"role": "user", "content": ["<é>", 1]}"#, false)])
        );
    }

    #[test]
    fn values_and_methods_are_pythons() {
        let messages =
            r#"[{"role":"user","content":"naïve é</think>done","x":1e-5,"y":[0.1,1e-7]}]"#;
        for (template, expected) in [
            (
                "{{ messages[0].y|tojson(indent=1) }}",
                "[\n 0.1,\n 1e-07\n]",
            ),
            (
                "{{ {'a': messages[0].x}|tojson(indent=2) }}",
                "{\n  \"a\": 1e-05\n}",
            ),
            ("{{ [{}, []]|tojson(indent=2) }}", "[\n  {},\n  []\n]"),
            (
                "{% set m = messages[0] %}{{ m.content[m.content.find('</think>') + 8:] }}",
                "done",
            ),
            (
                "{{ messages[0].content.rfind('é') }} {{ messages[0].content.find('q') }}",
                "6 -1",
            ),
            (
                "{{ 2.5|round }} {{ 3.5|round }} {{ 2.675|round(2) }} {{ 7|round }}",
                "2.0 4.0 2.67 7",
            ),
            (
                "{{ bos_token is defined }} {{ eos_token is defined }}",
                "False False",
            ),
            ("a\r\nb\rc\n{% if true %}\r\nd{% endif %}", "a\nb\nc\nd"),
        ] {
            let template =
                ChatTemplate::new(template, Default::default()).expect("it is a template");
            let parsed: Vec<Value> = serde_json::from_str(messages).expect("it is JSON");
            assert_eq!(template.text(&parsed, false).expect("it renders"), expected);
        }
        let special = ["<s>".to_owned(), String::new()];
        let template = ChatTemplate::new("{{ bos_token }}{{ eos_token is defined }}", special);
        let text = template.expect("it is a template").text(&[], false);
        assert_eq!(text.expect("it renders"), "<s>False");
    }

    #[test]
    fn templates_that_rewrite_earlier_answers_are_rejected() {
        let last_only = "{{ messages|length }}{{ messages[-1].content }}";
        let template = ChatTemplate::new(last_only, Default::default()).expect("it is a template");
        assert!(matches!(template.render(CHAT), Err(ChatError::NoMask(_))));
    }

    #[test]
    fn what_templates_need_and_lack_is_their_error() {
        for (template, name) in [
            ("{{ strftime_now('%d %b %Y') }}", "strftime_now"),
            ("{{ messages | sorted_by_time }}", "sorted_by_time"),
            ("{{ messages is grouped }}", "grouped"),
            ("{{ messages[0].content.reversed() }}", "reversed"),
        ] {
            let template = ChatTemplate::new(template, Default::default());
            let rendered = template.map(|template| template.render(CHAT));
            match rendered {
                Ok(Err(ChatError::Template(problem))) => {
                    assert!(problem.contains(name), "{problem}")
                }
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    #[test]
    fn exceptions_of_a_template_are_errors() {
        let template = "{{ raise_exception('only two roles') }}";
        let template = ChatTemplate::new(template, Default::default()).expect("it is a template");
        let Err(ChatError::Render(problem)) = template.render(CHAT) else {
            panic!("it must fail");
        };
        assert!(problem.contains("only two roles"), "{problem}");
    }
}
