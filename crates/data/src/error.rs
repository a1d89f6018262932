use std::io;
use std::path::PathBuf;

/// A reason why data cannot be read, packed or resumed.
///
/// Each message names the file and the line, row or byte, what was expected and found, and a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file or folder cannot be read.
    #[error("cannot read {}: {source}; check that it exists and is readable", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The path leads to no file that could be read.
    #[error("`{}` {problem}; name a file, a folder or a glob such as `data/*.jsonl`", path.display())]
    NoFiles {
        /// The file, folder or glob of the configuration.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The extension does not determine a format.
    #[error(
        "{} has the extension `{found}`, but expected one of {expected}; set the format, rename the file, or exclude it with a glob",
        path.display()
    )]
    Extension {
        /// The file.
        path: PathBuf,
        /// Its extension.
        found: String,
        /// The known extensions.
        expected: String,
    },
    /// A plain text file was given together with fields.
    #[error("{} is plain text, but {fields} was requested, and plain text has no fields; use JSONL or Parquet", path.display())]
    NoFields {
        /// The file.
        path: PathBuf,
        /// The fields of the configuration.
        fields: String,
    },
    /// A line is not a JSON object.
    #[error("{}, {place}: expected a JSON object, but {problem}; correct or remove the line", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The line.
        place: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A Parquet file cannot be decoded.
    #[error("{}, {place}: expected Parquet, but {problem}; write or download the file again", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The footer, or the row.
        place: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A field is missing.
    #[error("{}, {place}: expected the field `{field}`, but found {found}; name a field that every document has", path.display())]
    MissingField {
        /// The file.
        path: PathBuf,
        /// The line or row, or the schema.
        place: String,
        /// The field of the configuration.
        field: String,
        /// The fields that exist.
        found: String,
    },
    /// A field has another type.
    #[error("{}, {place}: expected `{field}` to be {expected}, but found {found}; correct the value or name another field", path.display())]
    FieldType {
        /// The file.
        path: PathBuf,
        /// The line or row.
        place: String,
        /// The field.
        field: String,
        /// The expected type.
        expected: &'static str,
        /// The type that was found.
        found: String,
    },
    /// Text is not UTF-8.
    #[error("{}, {place}: expected UTF-8, but found other bytes; convert the file, for example with iconv", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The line, row or byte.
        place: String,
    },
    /// A document exceeds the size that is read into memory.
    #[error("{}, {place}: expected at most {limit} bytes in a document, but found more; split the document", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The line or row.
        place: String,
        /// The limit.
        limit: usize,
    },
    /// There is nothing to train on.
    #[error("{} has no {part} documents with anything to learn: {problem}", path.display())]
    Empty {
        /// The file, folder or glob of the configuration.
        path: PathBuf,
        /// `training` or `held-out`.
        part: &'static str,
        /// What is wrong, and the remedy.
        problem: String,
    },
    /// The chat template is missing or cannot be parsed.
    #[error("the chat template {problem}; correct the template, or use text without one")]
    Template {
        /// What is wrong with it.
        problem: String,
    },
    /// The chat template rejects a document.
    #[error("{}, {place}: the chat template fails: {problem}; correct the messages or the template", path.display())]
    Render {
        /// The file.
        path: PathBuf,
        /// The line or row.
        place: String,
        /// The template engine's error.
        problem: String,
    },
    /// The parts that the assistant wrote cannot be located in the rendered chat.
    #[error(
        "{}, {place}: the chat template does not mark what the assistant writes, and {problem}; enclose it in \
         {{% generation %}} and {{% endgeneration %}} in the template",
        path.display()
    )]
    NoAssistantMask {
        /// The file.
        path: PathBuf,
        /// The line or row.
        place: String,
        /// Why the parts cannot be found by rendering prefixes of the chat.
        problem: String,
    },
    /// The tokenizer rejects a document.
    #[error("{}, {place}: the tokenizer fails: {problem}; correct the document or use another tokenizer", path.display())]
    Tokenize {
        /// The file.
        path: PathBuf,
        /// The line or row.
        place: String,
        /// The tokenizer's error.
        problem: String,
    },
    /// A file differs from the one that was there when the position was saved, or when the data was opened.
    #[error("{} has changed: expected {expected}, but found {found}; restore the file, or start a new run", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// The recorded size and checksum.
        expected: String,
        /// The current size and checksum.
        found: String,
    },
    /// A position was saved with another setting.
    #[error(
        "the position was saved with {name} {saved}, but now it is {given}; use the saved value, or start a new run"
    )]
    OtherSetting {
        /// The setting.
        name: String,
        /// Its value in the position.
        saved: String,
        /// Its value now.
        given: String,
    },
    /// A position is inconsistent.
    #[error("the position is not valid for this data: {problem}; resume from another saved step")]
    Position {
        /// What is wrong with it.
        problem: String,
    },
    /// A setting has an impossible value.
    #[error("{name} is {found}, but must be {expected}; correct the setting")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        found: String,
        /// The possible values.
        expected: String,
    },
}
