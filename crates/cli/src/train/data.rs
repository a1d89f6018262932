//! The tokens for training and evaluation.

use std::fmt;

use burn_fsdp_models::{
    Batches, ByteText, ModelConfig, Remark, TextCodec, TokenStream, TokenText, Unread,
};

use crate::args::TrainArgs;
use crate::codec::{self, Chosen};
use crate::error::InputError;
use crate::train::documents::{self, BesideTokens, Documents};
use crate::train::feed::Feed;
use crate::train::own_files::OwnFiles;

/// Maximum bytes of text that are read: far more than a run on a CPU uses, but little memory.
const MAX_TEXT_BYTES: usize = 16 << 20;

const MIB: f64 = (1 << 20) as f64;

/// The source of tokens.
#[derive(Debug)]
pub(crate) enum Data {
    /// Generated tokens, the same on every machine.
    Synthetic,
    /// Text from files, with a held-out part.
    Text(Box<Text>),
    /// Documents from files of any size, with a held-out part.
    Documents(Box<Documents>),
}

/// Text from files.
#[derive(Debug)]
pub(crate) struct Text {
    bytes: ByteText,
    /// The text as a tokenizer's tokens, if it is not read as bytes.
    tokens: Option<TokenText>,
    codec: TextCodec,
    /// The flags of the run's own files inside the text; these files are excluded from it.
    own: Vec<&'static str>,
    /// Number of saved steps of other runs inside the text, which are excluded from it.
    num_steps: usize,
    /// Warnings about the tokenized text.
    warnings: Vec<String>,
}

impl Text {
    fn read(args: &TrainArgs, chosen: Chosen, model: &ModelConfig) -> Result<Self, InputError> {
        let (mut own, mut num_steps) = (Vec::new(), 0);
        let bytes = match &args.data.data {
            Some(path) => {
                let files = OwnFiles::of(args, path);
                let read = ByteText::read_without(path, MAX_TEXT_BYTES, &|path| files.has(path))?;
                (own, num_steps) = (files.flags(), files.num_steps());
                read
            }
            None => ByteText::crate_sources()?,
        };
        let mut warnings = chosen.warnings(args.model.init.as_ref().map(|_| model));
        let tokens = match &chosen.codec {
            TextCodec::Bytes => None,
            TextCodec::Tokenizer(tokenizer) => Some(bytes.tokenized(tokenizer)?),
        };
        warnings.extend(tokens.iter().flat_map(unlike_the_text));
        Ok(Self {
            bytes,
            tokens,
            codec: chosen.codec,
            own,
            num_steps,
            warnings,
        })
    }

    fn training(&self) -> TokenStream {
        let tokens = self.tokens.as_ref();
        tokens.map_or_else(|| self.bytes.training(), TokenText::training)
    }

    fn held_out(&self) -> TokenStream {
        let tokens = self.tokens.as_ref();
        tokens.map_or_else(|| self.bytes.held_out(), TokenText::held_out)
    }

    /// Returns one sentence for each kind of data that is skipped or converted.
    fn remarks(&self) -> Vec<String> {
        let remarks = self.bytes.remarks();
        let mut sentences = Vec::new();
        let left_out = remarks.iter().filter(|(remark, ..)| {
            // The run's own files are listed by flag.
            remark.is_left_out() && *remark != Remark::Excluded
        });
        let left_out: Vec<_> = left_out
            .map(|(remark, count, first)| {
                format!("{count} {} (such as {})", remark.word(), first.display())
            })
            .collect();
        if !left_out.is_empty() {
            sentences.push(format!("left out of the text: {}", left_out.join(", ")));
        }
        if !self.own.is_empty() {
            let flags = self.own.join(", ");
            sentences.push(format!(
                "left out of the text: the files of {flags}, which are inside --data"
            ));
        }
        if self.num_steps > 0 {
            sentences.push(format!(
                "left out of the text: {} saved steps of other runs",
                self.num_steps
            ));
        }
        if let Some(unread) = self.bytes.unread() {
            sentences.push(format!(
                "the text is {}; the rest, from {} on, is not read",
                first_of(unread),
                unread.from.display()
            ));
        }
        for (remark, count, first) in remarks.iter() {
            let of = |problem: &str| format!("{count} files such as {} {problem}", first.display());
            sentences.extend(match remark {
                Remark::NotUtf8 => Some(of(
                    "are not in UTF-8 and are read byte by byte; convert them, for example with iconv",
                )),
                Remark::NamedBinary => Some(format!(
                    "{} is not text and is read byte by byte; name a text file",
                    first.display()
                )),
                _ => None,
            });
        }
        sentences
    }
}

/// Describes how much of the text is read.
fn first_of(unread: &Unread) -> String {
    let all = (MAX_TEXT_BYTES as u64 + unread.bytes) as f64 / MIB;
    let least = if unread.is_all { "" } else { "more than " };
    format!(
        "the first {:.0} MiB of {least}{all:.1}",
        MAX_TEXT_BYTES as f64 / MIB
    )
}

/// Returns warnings if the tokenizer cannot represent parts of the text.
fn unlike_the_text(tokens: &TokenText) -> Vec<String> {
    let warnings = [
        (
            tokens.num_replaced(),
            "characters of the text are not in UTF-8 and became U+FFFD; convert its files, for example with iconv",
        ),
        (
            tokens.num_unknown(),
            "tokens of the text are unknown to the tokenizer",
        ),
        (
            tokens.num_without(),
            "or more characters of the text have no token and are left out",
        ),
    ];
    let counted = warnings.into_iter().filter(|(count, _)| *count > 0);
    counted
        .map(|(count, text)| format!("{count} {text}"))
        .collect()
}

impl Data {
    /// Reads the text that the arguments specify, and checks that it is long enough for a step.
    pub(crate) fn read(
        args: &TrainArgs,
        chosen: Chosen,
        model: &ModelConfig,
    ) -> Result<Self, InputError> {
        if args.data.synthetic {
            return Ok(Self::Synthetic);
        }
        chosen.codec.check_vocab(model.vocab())?;
        if let Some(path) = args
            .data
            .data
            .as_ref()
            .filter(|_| documents::are_meant(&args.data))
        {
            let warnings = chosen.warnings(args.model.init.as_ref().map(|_| model));
            documents::check_packing(&args.data, model, args.model.seq)?;
            check_end(args, model.vocab())?;
            let documents = Documents::open(args, path, chosen.codec, warnings)?;
            return Ok(Self::Documents(Box::new(documents)));
        }
        let text = Text::read(args, chosen, model)?;
        let (batch, seq) = (args.training.batch, args.model.seq);
        let found = text.training().period().unwrap_or(usize::MAX);
        let needed = (batch * seq).saturating_add(1);
        if found < needed {
            let path = args
                .data
                .data
                .as_ref()
                .map(|path| path.display().to_string());
            let name = path.unwrap_or_else(|| "Burn's source code".to_owned());
            return Err(InputError::TextShorterThanStep {
                source_name: name,
                found,
                tokens: match text.codec {
                    TextCodec::Bytes => "bytes",
                    TextCodec::Tokenizer(_) => "tokens",
                },
                needed,
                batch,
                seq,
                left_out: text.bytes.remarks().to_string(),
            });
        }
        Ok(Self::Text(Box::new(text)))
    }

    /// Returns the batches for training: documents in order, or windows of the text at positions drawn with the seed.
    pub(crate) fn training(&self, vocab: usize, [batch, seq]: [usize; 2], seed: u64) -> Feed<'_> {
        let stream = match self {
            Self::Documents(documents) => return Feed::Documents(documents),
            Self::Synthetic => TokenStream::Synthetic { vocab },
            Self::Text(text) => match text.training() {
                TokenStream::Text(tokens) => TokenStream::Windows { tokens, seed },
                other => other,
            },
        };
        Feed::Tokens(Batches { stream, batch, seq })
    }

    /// Returns the batches for evaluation; `None` for synthetic tokens.
    pub(crate) fn held_out(&self, [batch, seq]: [usize; 2]) -> Option<Feed<'_>> {
        match self {
            Self::Synthetic => None,
            Self::Text(text) => Some(Feed::Tokens(Batches {
                stream: text.held_out(),
                batch,
                seq,
            })),
            Self::Documents(documents) => Some(Feed::HeldOut(documents)),
        }
    }

    /// Returns the codec, and the first `len` held-out tokens, or fewer; `None` if there are none.
    pub(crate) fn prompt(&self, len: usize) -> Option<(&TextCodec, Vec<i64>)> {
        match self {
            Self::Synthetic => None,
            Self::Text(text) => {
                let stream = text.held_out();
                let prompt = 0..stream.period().unwrap_or(1).min(len);
                let tokens = prompt.map(|index| stream.token(index)).collect();
                Some((&text.codec, tokens))
            }
            Self::Documents(documents) => Some((&documents.codec, documents.prompt(len)?)),
        }
    }

    /// Returns the tensors of a batch beside the tokens.
    pub(crate) fn beside_tokens(&self) -> BesideTokens {
        let documents = self.documents();
        documents.map(Documents::beside_tokens).unwrap_or_default()
    }

    /// Returns the documents, if these are the data.
    pub(crate) fn documents(&self) -> Option<&Documents> {
        match self {
            Self::Documents(documents) => Some(documents),
            Self::Synthetic | Self::Text(_) => None,
        }
    }

    /// Describes the tokens by size and checksum, which distinguishes two texts independently of the paths that they
    /// were read from.
    pub(crate) fn identity(&self) -> String {
        let text = match self {
            Self::Synthetic => return "synthetic tokens".to_owned(),
            Self::Documents(documents) => return documents.identity(),
            Self::Text(text) => text,
        };
        let mut hasher = crc32fast::Hasher::new();
        for part in text.bytes.parts() {
            hasher.update(part);
        }
        format!(
            "{} bytes of text with checksum {:08x}",
            text.bytes.num_bytes(),
            hasher.finalize()
        )
    }

    /// Identifies the tokenizer of the text; `None` for bytes and synthetic tokens.
    pub(crate) fn tokenizer(&self) -> Option<String> {
        match self {
            Self::Synthetic => None,
            Self::Text(text) => codec::identity(&text.codec),
            Self::Documents(documents) => codec::identity(&documents.codec),
        }
    }

    /// Identifies the tokenizer by its file, as earlier versions did.
    pub(crate) fn former_tokenizer(&self) -> Option<String> {
        match self {
            Self::Synthetic => None,
            Self::Text(text) => codec::former_identity(&text.codec),
            Self::Documents(documents) => codec::former_identity(&documents.codec),
        }
    }

    /// Returns warnings about the text.
    pub(crate) fn warnings(&self) -> Vec<String> {
        match self {
            Self::Synthetic => Vec::new(),
            Self::Text(text) => [text.remarks(), text.warnings.clone()].concat(),
            Self::Documents(documents) => documents.warnings.clone(),
        }
    }
}

/// Prints, for example, `7000000 bytes of text in 700 files, 35 of them held out`, `.. the last 5 % held out`, or
/// `synthetic tokens`. Adds the amount that was skipped, if any.
impl fmt::Display for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Synthetic => f.write_str("synthetic tokens"),
            Self::Text(text) => text.fmt(f),
            Self::Documents(documents) => documents.fmt(f),
        }
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, files) = (self.bytes.num_bytes(), self.bytes.num_files());
        write!(f, "{bytes} bytes of text in {files} files, ")?;
        if let Some(unread) = self.bytes.unread() {
            write!(f, "{}, ", first_of(unread))?;
        }
        if let Some(tokens) = &self.tokens {
            let parts = [tokens.training(), tokens.held_out()];
            let tokens = parts.iter().filter_map(TokenStream::period);
            write!(f, "{} tokens, ", tokens.sum::<usize>())?;
        }
        match self.bytes.num_held_out() {
            0 => f.write_str("the last 5 % held out")?,
            held_out => write!(f, "{held_out} of them held out")?,
        }
        let own = [
            (self.own.len(), Remark::Excluded.word()),
            (self.num_steps, "saved steps"),
        ];
        let own = own.into_iter().filter(|(count, _)| *count > 0);
        let own = own.map(|(count, word)| (true, count, word));
        let remarks = self.bytes.remarks().iter();
        let counted = remarks.filter(|(remark, ..)| *remark != Remark::Excluded);
        let counted =
            counted.map(|(remark, count, _)| (remark.is_left_out(), count, remark.word()));
        let all: Vec<_> = own.chain(counted).collect();
        for (of_left_out, start) in [(true, "; left out: "), (false, "; of these files, ")] {
            let these = all
                .iter()
                .filter(|(is_left_out, ..)| *is_left_out == of_left_out);
            for (index, (_, count, word)) in these.enumerate() {
                let start = if index == 0 { start } else { ", " };
                write!(f, "{start}{count} {word}")?;
            }
        }
        Ok(())
    }
}

/// Rejects a token at the end of texts that the model does not have.
fn check_end(args: &TrainArgs, vocab: usize) -> Result<(), InputError> {
    let end = documents::end_of_text(args)?.filter(|end| *end as usize >= vocab);
    match (end, &args.model.init) {
        (Some(end), Some(folder)) => Err(InputError::UnknownModel {
            path: folder.clone(),
            problem: format!(
                "`eos_token_id` is {end}, but the tokens are 0 to {}; correct it in generation_config.json or config.json",
                vocab.saturating_sub(1)
            ),
        }),
        _ => Ok(()),
    }
}
