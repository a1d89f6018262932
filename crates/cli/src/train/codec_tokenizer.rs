//! The codec of a run as the tokenizer of its documents.

use burn_fsdp_data::Tokenizer;
use burn_fsdp_models::TextCodec;

use super::chat_files::ChatFiles;
use crate::codec;

/// A text before a continuation.
const BREAK: &str = "\n";

/// A codec with the token that ends a document.
pub(super) struct CodecTokenizer {
    pub(super) codec: TextCodec,
    pub(super) end: Option<u32>,
    /// The template for chats, if the documents are chats.
    pub(super) chat: Option<ChatFiles>,
}

impl Tokenizer for CodecTokenizer {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        match &self.codec {
            TextCodec::Bytes => Ok(text.bytes().map(u32::from).collect()),
            TextCodec::Tokenizer(tokenizer) => tokenizer
                .encode(text, false)
                .map_err(|error| error.to_string()),
        }
    }

    fn encode_continuation(&self, text: &str, last: u32) -> Result<Vec<u32>, String> {
        let TextCodec::Tokenizer(tokenizer) = &self.codec else {
            return self.encode(text);
        };
        // Some tokenizers add a space before a text, some also after a special token. None adds one after a line break,
        // which they keep as a token.
        for before in tokenizer.added(last).into_iter().chain([BREAK]) {
            let whole = self.encode(&format!("{before}{text}"))?;
            let start = self.encode(before)?;
            if let Some(tokens) = whole.strip_prefix(&start[..]) {
                return Ok(tokens.to_vec());
            }
        }
        // The break is in a token with the text. Tokenizers with such tokens add no space.
        self.encode(text)
    }

    fn bos(&self) -> Option<u32> {
        match &self.codec {
            TextCodec::Bytes => None,
            TextCodec::Tokenizer(tokenizer) => tokenizer.encode("", true).ok()?.first().copied(),
        }
    }

    fn eos(&self) -> Option<u32> {
        self.end
    }

    fn special_names(&self) -> [String; 2] {
        let chat = self.chat.as_ref();
        chat.map(|chat| chat.special_names.clone())
            .unwrap_or_default()
    }

    fn chat_template(&self) -> Option<String> {
        self.chat.as_ref().map(|chat| chat.template.clone())
    }

    fn identity(&self) -> String {
        codec::identity(&self.codec).unwrap_or_else(|| "bytes".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use burn_fsdp_models::Tokenizer as File;
    use serde_json::json;

    use super::*;

    /// Parts after special tokens have the tokens that they have in the whole text, which `transformers` tokenizes.
    #[test]
    fn parts_have_the_tokens_of_the_whole_text() {
        let folder = tempfile::tempdir().expect("a folder");
        let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
        let bytes = |spaced: bool| json!({"type": "ByteLevel", "add_prefix_space": spaced, "trim_offsets": true, "use_regex": true});
        let prepend = json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
        for (name, normalizer, pre_tokenizer) in [
            ("Llama 2", prepend, json!(null)),
            ("always", json!(null), metaspace("always")),
            ("first", json!(null), metaspace("first")),
            ("never", json!(null), metaspace("never")),
            ("spaced bytes", json!(null), bytes(true)),
            ("bytes", json!(null), bytes(false)),
        ] {
            let letters = "▁Ġ\n[]/Iabu";
            let vocab = letters
                .chars()
                .zip(3..)
                .map(|(char, id)| (char.to_string(), json!(id)));
            let mut vocab: serde_json::Map<_, _> = vocab.collect();
            for (id, token) in ["<unk>", "<s>", "</s>"].into_iter().enumerate() {
                vocab.insert(token.to_owned(), json!(id));
            }
            vocab.insert("Ċ".to_owned(), json!(20));
            let added = [(1, "<s>"), (2, "</s>")].map(|(id, content)| {
                json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                       "normalized": false, "special": true})
            });
            let file = json!({
                "version": "1.0", "added_tokens": added, "normalizer": normalizer,
                "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null,
                "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>"},
            });
            let path = folder.path().join(format!("{name}.json"));
            std::fs::write(&path, file.to_string()).expect("writable");
            let codec = TextCodec::Tokenizer(File::open(&path).expect("a tokenizer"));
            let tokenizer = CodecTokenizer {
                codec,
                end: None,
                chat: None,
            };
            for parts in [
                ["<s>[I] u [/I]", " a</s>", "[I] u [/I]", " a b</s>"],
                ["<s>", "a</s>", "<s>[I]", " u</s>"],
                ["u", " a", "</s>", " b"],
            ] {
                let whole = tokenizer.encode(&parts.concat()).expect("tokens");
                let mut found = tokenizer.encode(parts[0]).expect("tokens");
                for part in &parts[1..] {
                    let last = *found.last().expect("a token");
                    found.extend(tokenizer.encode_continuation(part, last).expect("tokens"));
                }
                assert_eq!(found, whole, "{name}: {parts:?}");
            }
        }
    }
}
