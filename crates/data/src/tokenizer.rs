/// Converts text to tokens.
///
/// Errors are sentences about the text, such as "it has no token for `x`". [`DataError`](crate::DataError) adds the
/// file and the line or row.
pub trait Tokenizer: Send + Sync {
    /// Returns the tokens of a text, without [`bos`](Self::bos) and [`eos`](Self::eos). The names of special tokens in
    /// a rendered chat, such as `<|im_end|>`, become these tokens.
    ///
    /// # Errors
    ///
    /// If the text has no tokens.
    fn encode(&self, text: &str) -> Result<Vec<u32>, String>;

    /// Returns the tokens of a text that continues another, whose last token is `last`. A tokenizer that adds a space
    /// before a text must not add one here, unless it also adds one after a special token, and `last` is one.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode).
    fn encode_continuation(&self, text: &str, last: u32) -> Result<Vec<u32>, String> {
        let _ = last;
        self.encode(text)
    }

    /// Returns the token before each document, if there is one.
    fn bos(&self) -> Option<u32> {
        None
    }

    /// Returns the token after each document, if there is one.
    fn eos(&self) -> Option<u32>;

    /// Returns the token that fills incomplete sequences. It is never a target.
    fn padding(&self) -> u32 {
        self.eos().unwrap_or(0)
    }

    /// Returns the names of [`bos`](Self::bos) and [`eos`](Self::eos) in a chat template.
    fn special_names(&self) -> [String; 2] {
        Default::default()
    }

    /// Returns the Jinja template for chats, if there is one.
    fn chat_template(&self) -> Option<String> {
        None
    }

    /// Identifies the tokenizer, for example by a hash of its vocabulary. A position of another tokenizer is rejected.
    fn identity(&self) -> String;
}
