//! Tokenizers of the tests.

use burn_fsdp_data::Tokenizer;

pub(crate) const BOS: u32 = 256;
pub(crate) const EOS: u32 = 257;

/// Bytes, with tokens at the start and the end of a document.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bytes {
    pub(crate) template: Option<String>,
}

impl Tokenizer for Bytes {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        if text.contains('\u{7f}') {
            Err("it has no token for DEL".to_owned())
        } else {
            Ok(text.bytes().map(u32::from).collect())
        }
    }

    fn bos(&self) -> Option<u32> {
        Some(BOS)
    }

    fn eos(&self) -> Option<u32> {
        Some(EOS)
    }

    fn special_names(&self) -> [String; 2] {
        ["<s>", "</s>"].map(str::to_owned)
    }

    fn chat_template(&self) -> Option<String> {
        self.template.clone()
    }

    fn identity(&self) -> String {
        "bytes".to_owned()
    }
}
