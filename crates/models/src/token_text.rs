//! Text in the tokens of a tokenizer.

use std::ops::Range;

use crate::tokenizer::Placed;
use crate::{ByteText, ModelError, TokenRange, TokenStream, Tokenizer};

/// Sizes of the pieces in which a long text is tokenized, because a token takes many times its bytes in memory while it
/// is created.
#[derive(Debug, Clone, Copy)]
struct Pieces {
    /// Number of bytes of a piece, without the rest of its last line.
    bytes: usize,
    /// Number of context bytes on each side that are tokenized with a piece.
    around: usize,
    /// Maximum size of two neighboring pieces that are tokenized again as one because their tokens do not match.
    most: usize,
}

const PIECES: Pieces = Pieces {
    bytes: 64 << 10,
    around: 1 << 10,
    most: 1 << 20,
};

/// Number of pieces that are tokenized in parallel.
const AT_ONCE: usize = 16;

/// Number of tokens that must agree on both sides of the position where two pieces are joined.
const AGREEING: usize = 4;

/// Text as a tokenizer's tokens, with a part held out for evaluation.
#[derive(Clone, Debug)]
pub struct TokenText {
    training: TokenRange,
    held_out: TokenRange,
    num_replaced: usize,
    num_unknown: usize,
    num_without: usize,
}

impl TokenText {
    /// Returns the stream of the training tokens.
    #[must_use]
    pub fn training(&self) -> TokenStream {
        TokenStream::Text(self.training.clone())
    }

    /// Returns the stream of the evaluation tokens.
    #[must_use]
    pub fn held_out(&self) -> TokenStream {
        TokenStream::Text(self.held_out.clone())
    }

    /// Returns the number of U+FFFD characters that replace invalid UTF-8.
    #[must_use]
    pub fn num_replaced(&self) -> usize {
        self.num_replaced
    }

    /// Returns the number of tokens that represent text unknown to the tokenizer.
    #[must_use]
    pub fn num_unknown(&self) -> usize {
        self.num_unknown
    }

    /// Returns the number of characters without a token, not counting spaces and controls. There may be more, because
    /// some tokenizers do not report all of them.
    #[must_use]
    pub fn num_without(&self) -> usize {
        self.num_without
    }
}

impl ByteText {
    /// Tokenizes the text. Bytes that are not UTF-8 are replaced and [counted](TokenText::num_replaced). A character
    /// that is cut at the end of the text is skipped.
    ///
    /// The text is tokenized as a whole, without the tokens that a tokenizer adds before a text. If its end is held
    /// out, the held-out tokens are the ones that begin there. If files are held out, the held-out files and the others
    /// are tokenized separately.
    ///
    /// # Errors
    ///
    /// If the tokenizer rejects a part of the text, if the training or held-out part has no tokens, or if most of the
    /// text is not UTF-8 or is unknown to the tokenizer.
    pub fn tokenized(&self, tokenizer: &Tokenizer) -> Result<TokenText, ModelError> {
        let [training, held_out] = self.parts();
        let (training, held_out, num_replaced) = if self.num_held_out() > 0 {
            let (training, num_replaced) = part(training, 0, tokenizer)?;
            let (held_out, also_replaced) = part(held_out, 0, tokenizer)?;
            (training, held_out, num_replaced + also_replaced)
        } else {
            let before = &training[..training.len() - cut_bytes(training)];
            let cut = String::from_utf8_lossy(before).len();
            let all = [training, held_out].concat();
            let (all, num_replaced) = part(&all, cut, tokenizer)?;
            let (training, held_out) = all.divided();
            (training, held_out, num_replaced)
        };
        let unknown = tokenizer.unknown();
        let are_unknown = |tokens: &Tokens| {
            let of = |id: &&u32| Some(**id) == unknown;
            tokens.ids.iter().filter(of).count()
        };
        let num_unknown = are_unknown(&training) + are_unknown(&held_out);
        let num_without = training.num_without + held_out.num_without;
        let known = training.ids.len() + held_out.ids.len() - num_unknown;
        if num_unknown + num_without > known {
            return Err(tokenizer.refused(format!(
                "{num_unknown} of its tokens are unknown and {known} are known, and {num_without} characters have \
                 no token; give a tokenizer for this kind of text"
            )));
        }
        let range = |tokens: Tokens| {
            let none = || tokenizer.refused("part of it has no token".to_owned());
            TokenRange::of_ids(tokens.ids.into()).ok_or_else(none)
        };
        Ok(TokenText {
            training: range(training)?,
            held_out: range(held_out)?,
            num_replaced,
            num_unknown,
            num_without,
        })
    }
}

/// Returns the tokens of a part of the text, and the number of U+FFFD characters that replace other bytes. `cut` is
/// the byte at which the tokens are divided later.
fn part(bytes: &[u8], cut: usize, tokenizer: &Tokenizer) -> Result<(Tokens, usize), ModelError> {
    let bytes = &bytes[..bytes.len() - cut_bytes(bytes)];
    let text = String::from_utf8_lossy(bytes);
    let chunks = bytes.utf8_chunks();
    let num_replaced = chunks.filter(|chunk| !chunk.invalid().is_empty()).count();
    if num_replaced > text.chars().count() / 2 {
        let problem = "most of it is not in UTF-8; convert its files, for example with iconv";
        return Err(tokenizer.refused(problem.to_owned()));
    }
    Ok((tokens_of(tokenizer, &text, cut, PIECES)?, num_replaced))
}

/// The tokens of a text up to a position.
#[derive(Debug, Default)]
struct Tokens {
    ids: Vec<u32>,
    /// Byte of the text at which the tokens are divided.
    cut: usize,
    /// Number of tokens that begin before `cut`.
    num_before: usize,
    /// Byte of the text at which the tokens end.
    end: usize,
    num_without: usize,
}

impl Tokens {
    fn extend(&mut self, text: &str, tokens: &[Placed]) {
        for token in tokens {
            self.ids.push(token.id);
            self.num_before += usize::from(token.start < self.cut);
            self.skip_to(text, token.start);
            self.end = self.end.max(token.end);
        }
    }

    /// Splits the tokens into those that start before `cut` and the rest. Each part has at least one token if there are
    /// two.
    fn divided(mut self) -> (Self, Self) {
        let most = self.ids.len().saturating_sub(1);
        let rest = self.ids.split_off(self.num_before.max(1).min(most));
        let rest = Self {
            ids: rest,
            ..Self::default()
        };
        (self, rest)
    }

    /// Counts the characters, except whitespace and control characters, between the last token and byte `start` of the
    /// text, which have no token.
    fn skip_to(&mut self, text: &str, start: usize) {
        let without = text.get(self.end..start).unwrap_or_default();
        let is_seen = |char: &char| !char.is_whitespace() && !char.is_control();
        self.num_without += without.chars().filter(is_seen).count();
    }
}

/// Returns the number of bytes at the end that begin a character without completing it.
fn cut_bytes(text: &[u8]) -> usize {
    // A character has at most four bytes.
    let end = &text[text.len().saturating_sub(3)..];
    let starts = (1..=end.len()).map(|len| &end[end.len() - len..]);
    let is_cut = |end: &&[u8]| {
        let error = std::str::from_utf8(end).err();
        error.is_some_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
    };
    starts.into_iter().find(is_cut).map_or(0, <[u8]>::len)
}

/// The tokens of a piece of text and its surroundings.
struct Window {
    range: Range<usize>,
    /// Tokens, with byte positions in the whole text.
    tokens: Vec<Placed>,
    /// Index of the first token that is not yet in the result.
    begin: usize,
}

/// Tokenizes a text in pieces. The tokens are the same as for the text as a whole, unless a megabyte of it has no word
/// boundary.
///
/// The tokenizer receives pieces, each with its surroundings. Two neighboring pieces have common tokens there and
/// are joined at one of them, so the ends of pieces have no effect. `cut` is the byte at which the tokens are divided
/// later.
fn tokens_of(
    tokenizer: &Tokenizer,
    text: &str,
    cut: usize,
    sizes: Pieces,
) -> Result<Tokens, ModelError> {
    let pieces = pieces(text, sizes.bytes);
    let mut done = Tokens {
        cut,
        ..Tokens::default()
    };
    let mut last: Option<Window> = None;
    for some in pieces.chunks(AT_ONCE) {
        let ranges: Vec<_> = some
            .iter()
            .map(|piece| around(text, piece, sizes))
            .collect();
        let windows = windows(tokenizer, text, ranges)?;
        for (piece, window) in some.iter().zip(windows) {
            let window = match last.take() {
                None => window,
                Some(before) => join(
                    tokenizer,
                    text,
                    (before, window),
                    (piece.start, sizes),
                    &mut done,
                )?,
            };
            last = Some(window);
        }
    }
    if let Some(last) = last {
        done.extend(text, &last.tokens[last.begin..]);
    }
    done.skip_to(text, text.len());
    Ok(done)
}

/// Appends the tokens of a window up to the position near `cut` where the next window continues, and returns the next
/// window. If the two have too little in common, the result is one window of both.
fn join(
    tokenizer: &Tokenizer,
    text: &str,
    (before, mut next): (Window, Window),
    (cut, sizes): (usize, Pieces),
    done: &mut Tokens,
) -> Result<Window, ModelError> {
    if let Some((end, begin)) = meeting(&before, &next, cut) {
        done.extend(text, &before.tokens[before.begin..end]);
        next.begin = begin;
        return Ok(next);
    }
    let begin = before.tokens.get(before.begin).map(|token| token.start);
    let range = before.range.start..next.range.end;
    let mut again = if range.len() <= sizes.most {
        windows(tokenizer, text, vec![range])?
    } else {
        // A megabyte without word boundaries is cut at a position that may be wrong.
        windows(tokenizer, text, vec![range.start..cut, cut..range.end])?
    };
    again[0].begin = begin.map_or(0, |start| again[0].first_from(start));
    let last = again.pop().unwrap_or(next);
    for cut_off in again {
        done.extend(text, &cut_off.tokens[cut_off.begin..]);
    }
    Ok(last)
}

impl Window {
    /// Returns the index of the first token that begins at byte `start` or after it.
    fn first_from(&self, start: usize) -> usize {
        self.tokens.partition_point(|token| token.start < start)
    }
}

/// Returns the indices of the tokens at which one window ends and the other begins. This is the common token nearest to
/// `cut` whose neighbors on both sides agree in the two windows.
fn meeting(before: &Window, next: &Window, cut: usize) -> Option<(usize, usize)> {
    let first = before
        .first_from(next.range.start)
        .max(before.begin + AGREEING);
    let candidates = (first..before.tokens.len()).filter_map(|index| {
        let start = before.tokens[index].start;
        let other = next.first_from(start);
        let around = |tokens: &[Placed], at: usize| -> Option<Vec<Placed>> {
            let range = at.checked_sub(AGREEING)?..at + AGREEING;
            tokens.get(range).map(<[_]>::to_vec)
        };
        let same = around(&before.tokens, index)? == around(&next.tokens, other)?;
        same.then_some((start.abs_diff(cut), index, other))
    });
    candidates.min().map(|(_, index, other)| (index, other))
}

/// Tokenizes ranges of a text in parallel.
fn windows(
    tokenizer: &Tokenizer,
    text: &str,
    ranges: Vec<Range<usize>>,
) -> Result<Vec<Window>, ModelError> {
    let texts = ranges.iter().map(|range| &text[range.clone()]).collect();
    let tokens = tokenizer.encode_all(texts)?;
    let window = |(range, mut tokens): (Range<usize>, Vec<Placed>)| {
        for token in &mut tokens {
            token.start += range.start;
            token.end += range.start;
        }
        Window {
            range,
            tokens,
            begin: 0,
        }
    };
    Ok(ranges.into_iter().zip(tokens).map(window).collect())
}

/// Returns the range of a piece with its surroundings.
fn around(text: &str, piece: &Range<usize>, sizes: Pieces) -> Range<usize> {
    let start = piece.start.saturating_sub(sizes.around);
    let end = piece.end.saturating_add(sizes.around);
    text.floor_char_boundary(start)..text.ceil_char_boundary(end)
}

/// Cuts a text at the ends of lines, or at character boundaries if a line is too long for a piece.
fn pieces(text: &str, bytes: usize) -> Vec<Range<usize>> {
    let mut pieces = Vec::new();
    let mut start = 0;
    while text.len() - start > bytes {
        let least = text.ceil_char_boundary(start + bytes);
        let most = text.ceil_char_boundary(start + 2 * bytes);
        let line = text[least..most].find('\n');
        let end = line.map_or(most, |end| least + end + 1);
        pieces.push(start..end);
        start = end;
    }
    pieces.push(start..text.len());
    pieces
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::{Value, json};

    use super::*;

    const SMALL: Pieces = Pieces {
        bytes: 700,
        around: 120,
        most: 3000,
    };

    /// Returns the tests' byte-pair tokenizer with different rules.
    fn with(rules: Value) -> Tokenizer {
        let mut all: Value =
            serde_json::from_str(include_str!("../tests/models/tokenizer.json")).unwrap();
        for (name, rule) in rules.as_object().unwrap() {
            all[name] = rule.clone();
        }
        of(&all)
    }

    fn of(json: &Value) -> Tokenizer {
        let folder = tempfile::tempdir().unwrap();
        let path: PathBuf = folder.path().join("tokenizer.json");
        std::fs::write(&path, json.to_string()).unwrap();
        Tokenizer::open(path).unwrap()
    }

    /// A byte-pair vocabulary without word boundaries, as in SentencePiece.
    fn without_words() -> Value {
        let mut vocab = serde_json::Map::new();
        let mut add = |token: String| {
            let id = vocab.len();
            vocab.entry(token).or_insert(id.into());
        };
        for token in ["<unk>", "\u{2581}", "\n"] {
            add(token.to_owned());
        }
        ('a'..='z').for_each(|letter| add(letter.to_string()));
        let pairs = [
            "t h",
            "th e",
            "\u{2581} the",
            "a t",
            "c at",
            "\u{2581} cat",
            "o n",
            "e r",
            "\u{2581} o",
        ];
        pairs.iter().for_each(|pair| add(pair.replace(' ', "")));
        json!({
            "version": "1.0", "added_tokens": [], "pre_tokenizer": null, "post_processor": null,
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "\u{2581}"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
            ]},
            "decoder": {"type": "Fuse"},
            "model": {"type": "BPE", "vocab": vocab, "merges": pairs, "unk_token": "<unk>", "fuse_unk": true},
        })
    }

    fn texts() -> Vec<String> {
        let mut random = 7_u64;
        let mut next = move |end: u64| {
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (random >> 33) % end
        };
        let words = [
            "the",
            "cat",
            " ",
            "\n",
            "\n\n",
            "  ",
            "on",
            "a",
            "fn main() {}",
            "\t",
            "äö",
            "🦀",
            ".",
            "...\r\n",
            "o'er",
            "12345",
        ];
        let prose = |next: &mut dyn FnMut(u64) -> u64| -> String {
            let word = |_| {
                format!(
                    "{}{}",
                    words[next(words.len() as u64) as usize],
                    [" ", ""][next(4).min(1) as usize]
                )
            };
            (0..4000).map(word).collect()
        };
        vec![
            prose(&mut next),
            "the cat sat on the mat\n".repeat(700),
            // One line.
            "the cat on the other ".repeat(900),
            "\n".repeat(9000),
            String::new(),
            "the".to_owned(),
        ]
    }

    #[test]
    fn pieces_have_the_tokens_of_the_text_as_a_whole() {
        let prefixed = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        let strip = json!({"type": "Strip", "strip_left": true, "strip_right": true});
        let metaspace = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
        for (name, tokenizer) in [
            ("as it is", with(json!({}))),
            (
                "with a space in front",
                with(json!({"pre_tokenizer": prefixed})),
            ),
            ("stripped", with(json!({"normalizer": strip}))),
            (
                "of words with marks",
                with(json!({"pre_tokenizer": metaspace})),
            ),
            ("without words", of(&without_words())),
        ] {
            for (index, text) in texts().iter().enumerate() {
                let whole = tokenizer.encode(text, false).unwrap();
                let got = tokens_of(&tokenizer, text, 0, SMALL).unwrap().ids;
                assert!(
                    got == whole,
                    "{name}, text {index}: {} of {}",
                    got.len(),
                    whole.len()
                );
            }
        }
    }

    #[test]
    fn a_line_without_end_is_tokenized_in_bounded_pieces() {
        // Letters are paired from the start of each piece, so no two pieces agree.
        let mut json = without_words();
        json["model"]["vocab"]["zz"] = 99.into();
        json["model"]["merges"]
            .as_array_mut()
            .unwrap()
            .push("z z".into());
        let tokenizer = of(&json);
        let text = "z".repeat(20_001);
        let ids = tokens_of(&tokenizer, &text, 0, SMALL).unwrap().ids;
        let letters: usize = ids.iter().map(|id| if *id == 99 { 2 } else { 1 }).sum();
        // The mark at the start is a separate token.
        assert!(letters.abs_diff(text.len() + 1) < 60, "{letters}");
    }

    #[test]
    fn characters_without_tokens_are_counted() {
        let mut json = without_words();
        let text = "the cat, on the mat: äöü on\n".repeat(300);
        // Three letters and two marks of each line are unknown, adjacent or not.
        let tokens = tokens_of(&of(&json), &text, 0, SMALL).unwrap();
        let unknown = tokens.ids.iter().filter(|id| **id == 0).count();
        assert_eq!((unknown, tokens.num_without), (3 * 300, 0));
        // Without a token for unknown text, they would be lost.
        json["model"]["unk_token"] = Value::Null;
        let tokens = tokens_of(&of(&json), &text, 0, SMALL).unwrap();
        assert!(tokens.num_without > 0);
    }

    #[test]
    fn pieces_end_with_lines_and_are_the_text() {
        let lines: String = (0..4_000).map(|line| format!("{line} äöü\n")).collect();
        let long = "ä".repeat(3000);
        for text in [&lines[..], &long, "", "short"] {
            let pieces = pieces(text, 1000);
            let texts: Vec<_> = pieces.iter().map(|piece| &text[piece.clone()]).collect();
            assert_eq!(texts.concat(), text);
            assert!(texts.iter().all(|piece| piece.len() <= 2 * 1000 + 3));
        }
        let of_lines = pieces(&lines, 1000);
        assert!(of_lines.len() > 5);
        assert!(
            of_lines
                .iter()
                .all(|piece| lines[piece.clone()].ends_with('\n'))
        );
    }

    #[test]
    fn characters_that_an_end_cuts_are_found() {
        for (text, cut) in [
            (&b"abc"[..], 0),
            ("aé".as_bytes(), 0),
            (&"aé".as_bytes()[..2], 1),
            (&"a🦀".as_bytes()[..4], 3),
            (&"a🦀".as_bytes()[..2], 1),
            (b"\xff", 0),
            (b"", 0),
        ] {
            assert_eq!(cut_bytes(text), cut, "{text:?}");
        }
    }
}
