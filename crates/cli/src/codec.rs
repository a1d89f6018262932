//! The codec of a command: the conversion between text and tokens, and its identity in a saved step.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use burn_fsdp_models::{BYTE_VOCAB, ModelConfig, ModelError, TextCodec, Tokenizer};

use crate::error::InputError;

/// Name of the tokenizer file in the supported format.
const READ: &str = "tokenizer.json";

/// Prefixes of the file names of unsupported tokenizers; those with a vocabulary come first.
const OTHERS: [&str; 11] = [
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece",
    "vocab.",
    "merges.txt",
    "encoder.json",
    "tokenizer.",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
];

/// Suffixes of the file names of unsupported tokenizers.
const OTHER_ENDS: [&str; 3] = [".tiktoken", ".spm", ".bpe.model"];

/// A tokenizer as specified on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TokenizerArg {
    /// No tokenizer: each byte is a token.
    Bytes,
    File(PathBuf),
}

impl TokenizerArg {
    /// Returns the tokenizer's file; `None` for bytes.
    pub(crate) fn file(&self) -> Option<&Path> {
        match self {
            Self::Bytes => None,
            Self::File(path) => Some(path),
        }
    }
}

impl From<OsString> for TokenizerArg {
    fn from(text: OsString) -> Self {
        if text == "bytes" {
            Self::Bytes
        } else {
            Self::File(text.into())
        }
    }
}

/// The codec that a command has chosen.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) codec: TextCodec,
    /// True if bytes are not a guess: the command line requested them, a saved step used them, or no text is read.
    are_bytes_given: bool,
    warning: Option<String>,
}

impl Chosen {
    /// Returns the codec for a command that reads no text.
    pub(crate) fn none() -> Self {
        Self {
            codec: TextCodec::Bytes,
            are_bytes_given: true,
            warning: None,
        }
    }

    /// Finds the codec: the given tokenizer, else the tokenizer of a folder in Hugging Face's format, else bytes.
    ///
    /// # Errors
    ///
    /// [`InputError::Model`] if the tokenizer cannot be read. [`InputError::OtherTokenizerForm`] if the folder has a
    /// tokenizer in a format that is not supported, unless `are_bytes` returns true: then the model was trained on
    /// bytes.
    pub(crate) fn find(
        given: Option<&TokenizerArg>,
        folder: Option<&Path>,
        are_bytes: impl FnOnce() -> bool,
    ) -> Result<Self, InputError> {
        let of_bytes = |are_bytes_given, warning| Self {
            codec: TextCodec::Bytes,
            are_bytes_given,
            warning,
        };
        let in_folder = folder.map(|folder| folder.join(READ));
        // A dangling link is an error, not a reason to use bytes.
        let in_folder = in_folder.filter(|path| path.symlink_metadata().is_ok());
        match (given, in_folder, folder) {
            (Some(TokenizerArg::Bytes), ..) => Ok(of_bytes(true, None)),
            (Some(TokenizerArg::File(path)), in_folder, _) => {
                let tokenizer = Tokenizer::open(path)?;
                Ok(Self {
                    warning: in_folder.and_then(|own| other_than(&tokenizer, path, own)),
                    codec: TextCodec::Tokenizer(tokenizer),
                    are_bytes_given: false,
                })
            }
            (None, Some(path), _) => Ok(Self {
                codec: TextCodec::Tokenizer(Tokenizer::open(path)?),
                are_bytes_given: false,
                warning: None,
            }),
            (None, None, folder) => match folder.and_then(other_form) {
                None => Ok(of_bytes(false, None)),
                Some(path) if are_bytes() => Ok(of_bytes(
                    true,
                    Some(format!(
                        "{} is ignored: each byte is a token, as when the step was saved",
                        path.display()
                    )),
                )),
                Some(path) => Err(InputError::OtherTokenizerForm { path }),
            },
        }
    }

    /// Returns warnings about the choice of codec. `of_init` is the model of `--init`, if there is one.
    pub(crate) fn warnings(&self, of_init: Option<&ModelConfig>) -> Vec<String> {
        let vocab = of_init.map_or(BYTE_VOCAB, ModelConfig::vocab);
        let is_guess = matches!(self.codec, TextCodec::Bytes) && !self.are_bytes_given;
        let guess = (is_guess && vocab != BYTE_VOCAB).then(|| {
            format!(
                "the model of --init has {vocab} tokens and no tokenizer, so byte b of the text is read as token b; \
                 pass its tokenizer.json with --tokenizer, or pass --tokenizer bytes if that is right"
            )
        });
        self.warning.iter().cloned().chain(guess).collect()
    }
}

/// Returns a warning if the folder has a tokenizer that differs from the given one.
fn other_than(given: &Tokenizer, path: &Path, in_folder: PathBuf) -> Option<String> {
    // An unreadable tokenizer causes no warning, because it was not requested.
    let own = Tokenizer::open(&in_folder).ok()?;
    (own.hash() != given.hash()).then(|| {
        format!(
            "--tokenizer {} differs from {}, the tokenizer of the model",
            path.display(),
            in_folder.display()
        )
    })
}

/// Returns the file of a tokenizer in an unsupported format, if there is one in the folder.
fn other_form(folder: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let names = entries.filter_map(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        let starts = OTHERS.iter().position(|start| name.starts_with(start));
        let ends = OTHER_ENDS.iter().any(|end| name.ends_with(end));
        let place = ends.then_some(0).or(starts)?;
        Some((place, name))
    });
    names.min().map(|(_, name)| folder.join(name))
}

/// Returns the tokens of a prompt. The tokens that a tokenizer adds before a text are left out if the prompt has them, as
/// chats rendered by a template do.
pub(crate) fn prompt(codec: &TextCodec, text: &str) -> Result<Vec<i64>, ModelError> {
    let Some(tokenizer) = tokenizer_of(codec) else {
        return codec.encode(text);
    };
    let (own, added) = (tokenizer.encode(text, false)?, tokenizer.encode("", true)?);
    if added.is_empty() || !own.starts_with(&added) {
        return codec.encode(text);
    }
    Ok(own.into_iter().map(i64::from).collect())
}

/// Returns the id of a token that is not part of a text, such as `<|im_end|>`; `None` for any other text.
pub(crate) fn special(codec: &TextCodec, text: &str) -> Result<Option<u32>, ModelError> {
    let Some(tokenizer) = tokenizer_of(codec) else {
        return Ok(None);
    };
    let ids = tokenizer.encode(text, false)?;
    match ids[..] {
        [id] if tokenizer.decode(&ids)?.is_empty() => Ok(Some(id)),
        _ => Ok(None),
    }
}

/// Identifies a tokenizer by its number of tokens and a hash of its vocabulary and rules; `None` for bytes.
pub(crate) fn identity(codec: &TextCodec) -> Option<String> {
    let tokenizer = tokenizer_of(codec)?;
    let (num_ids, hash) = (tokenizer.num_ids(), tokenizer.hash());
    Some(format!(
        "a tokenizer of {num_ids} tokens with hash {hash:016x}"
    ))
}

/// Returns true if a saved step was trained on tokens of this codec. `saved` is the tokenizer in the step's settings,
/// `None` for bytes.
pub(crate) fn is_of(codec: &TextCodec, saved: Option<&str>) -> bool {
    saved == identity(codec).as_deref() || saved == former_identity(codec).as_deref()
}

/// Returns the identity that earlier versions saved: number of tokens and checksum of the file. `None` for bytes.
pub(crate) fn former_identity(codec: &TextCodec) -> Option<String> {
    let tokenizer = tokenizer_of(codec)?;
    let (num_ids, checksum) = (tokenizer.num_ids(), tokenizer.checksum());
    Some(format!(
        "a tokenizer of {num_ids} tokens with checksum {checksum:016x}"
    ))
}

fn tokenizer_of(codec: &TextCodec) -> Option<&Tokenizer> {
    match codec {
        TextCodec::Bytes => None,
        TextCodec::Tokenizer(tokenizer) => Some(tokenizer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_tokenizer_formats_are_recognized_by_name() {
        for (names, want) in [
            (
                &["tokenizer_config.json", "tokenizer.model"][..],
                Some("tokenizer.model"),
            ),
            (&["merges.txt", "vocab.json"], Some("vocab.json")),
            (&["qwen.tiktoken", "config.json"], Some("qwen.tiktoken")),
            (&["tokenizer.model.v3"], Some("tokenizer.model.v3")),
            (
                &["sentencepiece.bpe.model"],
                Some("sentencepiece.bpe.model"),
            ),
            (&["tokenizer_config.json"], Some("tokenizer_config.json")),
            (
                &["config.json", "model.safetensors", "chat_template.jinja"],
                None,
            ),
        ] {
            let folder = tempfile::tempdir().expect("a folder");
            for name in names {
                fs::write(folder.path().join(name), "x").expect("a writable folder");
            }
            let want = want.map(|name| folder.path().join(name));
            assert_eq!(other_form(folder.path()), want, "{names:?}");
        }
    }

    #[test]
    fn a_prompt_begins_once_and_special_tokens_are_found() {
        let json = r#"{"version": "1.0", "added_tokens": [
            {"id": 0, "content": "<s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false,
             "normalized": false},
            {"id": 1, "content": "<|end|>", "special": true, "single_word": false, "lstrip": false, "rstrip": false,
             "normalized": false}],
            "normalizer": null, "decoder": null,
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": false},
            "post_processor": {"type": "TemplateProcessing",
             "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
             "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
             "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
            "model": {"type": "WordLevel", "vocab": {"<s>": 0, "<|end|>": 1, "a": 2, "b": 3}, "unk_token": "a"}}"#;
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokenizer.json");
        fs::write(&path, json).expect("a writable folder");
        let codec = TextCodec::Tokenizer(Tokenizer::open(path).expect("a tokenizer"));
        for text in ["ab", "<s>ab"] {
            assert_eq!(prompt(&codec, text).expect("tokens"), [0, 2, 3], "{text}");
        }
        let found = |text: &str| special(&codec, text).expect("tokens");
        assert_eq!(found("<|end|>"), Some(1));
        assert_eq!(found("a"), None);
        assert_eq!(found("<|end|>a"), None);
        assert_eq!(special(&TextCodec::Bytes, "<|end|>").expect("bytes"), None);
    }

    /// Steps of earlier versions identify the tokenizer by the checksum of its file.
    #[test]
    fn a_step_of_a_former_version_has_its_tokenizer() {
        let json = include_str!("../../models/tests/models/tokenizer.json");
        let folder = tempfile::tempdir().expect("a folder");
        let open = |text: &str| {
            let path = folder.path().join("tokenizer.json");
            fs::write(&path, text).expect("a writable folder");
            TextCodec::Tokenizer(Tokenizer::open(path).expect("a tokenizer"))
        };
        let codec = open(json);
        let former = former_identity(&codec);
        let own = identity(&codec);
        assert_ne!(former, own);
        for saved in [&former, &own] {
            assert!(is_of(&codec, saved.as_deref()), "{saved:?}");
            assert!(!is_of(&TextCodec::Bytes, saved.as_deref()), "{saved:?}");
        }
        assert!(!is_of(&codec, None));
        assert!(is_of(&TextCodec::Bytes, None));
        // For another file, the former name does not match, but the present one does.
        let again = open(&format!(" {json}"));
        assert!(is_of(&again, own.as_deref()));
        assert!(!is_of(&again, former.as_deref()));
    }
}
