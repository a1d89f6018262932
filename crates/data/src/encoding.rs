//! Documents as tokens, with the tokens that are learned.

use std::fmt;
use std::sync::Arc;

use crate::blocks::{Blocks, Located};
use crate::chat::{ChatError, ChatTemplate};
use crate::document::{Chat, Document};
use crate::place::At;
use crate::{DataError, Fields, Tokenizer};

/// The tokens of a document.
#[derive(Debug, Default)]
pub(crate) struct Encoded {
    pub(crate) tokens: Vec<u32>,
    /// For each token, whether it is learned when it is a target.
    pub(crate) learned: Vec<bool>,
}

impl Encoded {
    fn extend(&mut self, tokens: impl IntoIterator<Item = u32>, is_learned: bool) {
        self.tokens.extend(tokens);
        self.learned.resize(self.tokens.len(), is_learned);
    }

    /// Returns the number of pairs of a token and its successor.
    pub(crate) fn num_pairs(&self) -> usize {
        self.tokens.len().saturating_sub(1)
    }

    /// Returns true if a successor is learned.
    pub(crate) fn is_useful(&self) -> bool {
        self.learned.iter().skip(1).any(|is_learned| *is_learned)
    }
}

/// A tokenizer with its parsed chat template.
pub(crate) struct Encoder {
    pub(crate) tokenizer: Arc<dyn Tokenizer>,
    chat: Option<ChatTemplate>,
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder")
            .field("tokenizer", &self.tokenizer.identity())
            .finish_non_exhaustive()
    }
}

impl Encoder {
    pub(crate) fn new(fields: &Fields, tokenizer: Arc<dyn Tokenizer>) -> Result<Self, DataError> {
        let refused = |problem: String| DataError::Template { problem };
        let chat = match fields {
            Fields::Chat(_) => {
                let source = tokenizer.chat_template();
                let source =
                    source.ok_or_else(|| refused("of the tokenizer is missing".to_owned()))?;
                Some(ChatTemplate::new(&source, tokenizer.special_names()).map_err(refused)?)
            }
            _ => None,
        };
        Ok(Self { tokenizer, chat })
    }

    /// Returns the tokens of a document. Parts with and without loss are tokenized separately, as in generation, which
    /// never sees a token across the end of a prompt.
    pub(crate) fn encode(&self, located: &Located, blocks: &Blocks) -> Result<Encoded, DataError> {
        let at = At {
            path: &blocks.files[located.file].path,
            place: located.place,
        };
        let (parts, is_chat) = match &located.document {
            Document::Text(text) => (vec![(text.clone(), true)], false),
            Document::Completion([prompt, completion]) => (
                vec![(prompt.clone(), false), (completion.clone(), true)],
                false,
            ),
            Document::Chat(Chat { messages, .. }) => {
                let parts = self
                    .chat
                    .as_ref()
                    .map_or_else(|| Ok(Vec::new()), |chat| chat.render(messages));
                (parts.map_err(|error| chat_error(error, &at))?, true)
            }
        };
        let mut encoded = Encoded::default();
        if !is_chat {
            encoded.extend(self.tokenizer.bos(), false);
        }
        let mut last = None;
        for (text, is_learned) in parts.iter().filter(|(text, _)| !text.is_empty()) {
            let tokens = match last {
                None => self.tokenizer.encode(text),
                Some(last) => self.tokenizer.encode_continuation(text, last),
            };
            let tokens = tokens.map_err(|problem| DataError::Tokenize {
                path: at.path.to_owned(),
                place: at.place(),
                problem,
            })?;
            last = tokens.last().copied().or(last);
            encoded.extend(tokens, *is_learned);
        }
        if !is_chat {
            // A template has its own tokens at the start and the end.
            encoded.extend(self.tokenizer.eos(), true);
        }
        Ok(encoded)
    }
}

fn chat_error(error: ChatError, at: &At<'_>) -> DataError {
    let (path, place) = (at.path.to_owned(), at.place());
    match error {
        ChatError::Template(problem) => DataError::Template { problem },
        ChatError::Render(problem) => DataError::Render {
            path,
            place,
            problem,
        },
        ChatError::NoMask(problem) => DataError::NoAssistantMask {
            path,
            place,
            problem,
        },
    }
}
