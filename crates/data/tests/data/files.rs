//! Files of the tests.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;

/// The fields of a document: one text, or a prompt with its completion.
pub(crate) type Parts = Vec<String>;

pub(crate) fn jsonl(names: &[&str], documents: &[Parts]) -> String {
    let line = |parts: &Parts| {
        let entries = names
            .iter()
            .zip(parts)
            .map(|(name, part)| ((*name).to_owned(), json!(part)));
        let object: serde_json::Map<_, _> = entries.chain([("id".to_owned(), json!(7))]).collect();
        format!("{}\n", serde_json::Value::from(object))
    };
    documents.iter().map(line).collect()
}

/// Writes text columns, with a row group for each slice.
pub(crate) fn write_parquet(path: &Path, names: &[&str], groups: &[&[Parts]]) {
    let columns: String = names
        .iter()
        .map(|name| format!("required binary {name} (UTF8); "))
        .collect();
    write_binary(path, &columns, names.len(), groups);
}

pub(crate) fn write_binary(path: &Path, columns: &str, num_columns: usize, groups: &[&[Parts]]) {
    let schema = parse_message_type(&format!("message schema {{ {columns} }}")).expect("a schema");
    let file = File::create(path).expect("a file");
    let compression = parquet::basic::Compression::SNAPPY;
    let properties = WriterProperties::builder()
        .set_compression(compression)
        .build();
    let mut writer =
        SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties)).expect("a writer");
    for group in groups {
        let mut rows = writer.next_row_group().expect("a row group");
        for index in 0..num_columns {
            let mut column = rows.next_column().expect("a column").expect("one more");
            let values: Vec<ByteArray> = group
                .iter()
                .map(|parts| ByteArray::from(parts[index].as_str()))
                .collect();
            column
                .typed::<ByteArrayType>()
                .write_batch(&values, None, None)
                .expect("written");
            column.close().expect("closed");
        }
        rows.close().expect("closed");
    }
    writer.close().expect("closed");
}

/// Writes a column of chats, each a list of role and content.
pub(crate) fn write_chats(path: &Path, chats: &[&[[&str; 2]]]) {
    let schema = "message schema { optional group messages (LIST) { repeated group list { optional group element {
        optional binary role (UTF8); optional binary content (UTF8); } } } }";
    let schema = Arc::new(parse_message_type(schema).expect("a schema"));
    let file = File::create(path).expect("a file");
    let mut writer = SerializedFileWriter::new(file, schema, Arc::default()).expect("a writer");
    let mut rows = writer.next_row_group().expect("a row group");
    for index in 0..2 {
        let (mut values, mut definitions, mut repetitions) = (Vec::new(), Vec::new(), Vec::new());
        for chat in chats {
            for (place, message) in chat.iter().enumerate() {
                values.push(ByteArray::from(message[index]));
                definitions.push(4);
                repetitions.push(i16::from(place > 0));
            }
        }
        let mut column = rows.next_column().expect("a column").expect("one more");
        let typed = column.typed::<ByteArrayType>();
        typed
            .write_batch(&values, Some(&definitions), Some(&repetitions))
            .expect("written");
        column.close().expect("closed");
    }
    rows.close().expect("closed");
    writer.close().expect("closed");
}

pub(crate) fn write(path: &Path, bytes: impl AsRef<[u8]>) {
    fs::create_dir_all(path.parent().expect("a folder")).expect("created");
    fs::write(path, bytes).expect("written");
}
