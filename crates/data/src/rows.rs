//! Row groups of Parquet files.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use minijinja::Value;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::{ReaderIter, TreeBuilder};
use parquet::record::{Field, Row};
use parquet::schema::types::{SchemaDescriptor, Type};

use crate::document::{Document, names};
use crate::files::SourceFile;
use crate::place::{At, MAX_DOCUMENT_BYTES, Place};
use crate::{DataError, Fields};

/// Rows that are decoded at once.
const BATCH_ROWS: usize = 64;

/// The rows of one row group.
pub(crate) struct Rows {
    iter: ReaderIter,
    /// The next row of the file, from 1.
    row: u64,
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rows")
            .field("row", &self.row)
            .finish_non_exhaustive()
    }
}

/// Returns the number of row groups of a file, whose schema must have the fields.
pub(crate) fn num_row_groups(source: &SourceFile, fields: &Fields) -> Result<u64, DataError> {
    let reader = open(source)?;
    projection(source, fields, reader.metadata().file_metadata().schema())?;
    Ok(reader.num_row_groups() as u64)
}

fn open(source: &SourceFile) -> Result<SerializedFileReader<std::fs::File>, DataError> {
    let file = source.open()?;
    caught(|| SerializedFileReader::new(file))
        .map_err(|problem| broken(source, "the footer", problem))
}

/// Returns the schema of the fields.
fn projection(source: &SourceFile, fields: &Fields, schema: &Type) -> Result<Type, DataError> {
    let mut columns = Vec::new();
    for name in fields.names() {
        let column = schema
            .get_fields()
            .iter()
            .find(|column| column.name() == name);
        columns.push(Arc::clone(column.ok_or_else(|| {
            DataError::MissingField {
                path: source.path.clone(),
                place: "the schema".to_owned(),
                field: name.to_owned(),
                found: names(schema.get_fields().iter().map(|column| column.name())),
            }
        })?));
    }
    columns.dedup_by(|one, other| one.name() == other.name());
    let built = Type::group_type_builder(schema.name())
        .with_fields(columns)
        .build();
    built.map_err(|error| broken(source, "the schema", error.to_string()))
}

impl Rows {
    pub(crate) fn open(
        source: &SourceFile,
        fields: &Fields,
        group: u64,
    ) -> Result<Self, DataError> {
        let reader = open(source)?;
        let projection = projection(source, fields, reader.metadata().file_metadata().schema())?;
        let groups = reader.metadata().row_groups();
        let before: i64 = groups
            .iter()
            .take(group as usize)
            .map(|group| group.num_rows())
            .sum();
        let row = before as u64 + 1;
        let iter = caught(|| {
            let descriptor = Arc::new(SchemaDescriptor::new(Arc::new(projection)));
            let group = reader.get_row_group(group as usize)?;
            TreeBuilder::new()
                .with_batch_size(BATCH_ROWS)
                .as_iter(descriptor, group.as_ref())
        });
        let iter = iter
            .map_err(|problem| broken(source, &format!("the row group at row {row}"), problem))?;
        Ok(Self { iter, row })
    }

    fn row(&mut self, source: &SourceFile) -> Result<Option<Row>, DataError> {
        let row = caught(|| self.iter.next().transpose());
        let row = row.map_err(|problem| {
            if problem.contains("Utf8Error") {
                return At {
                    path: &source.path,
                    place: Place::Row(self.row),
                }
                .not_utf8();
            }
            broken(source, &format!("row {}", self.row), problem)
        })?;
        self.row += u64::from(row.is_some());
        Ok(row)
    }

    /// Skips a document. Returns false at the end of the row group.
    pub(crate) fn skip(&mut self, source: &SourceFile) -> Result<bool, DataError> {
        Ok(self.row(source)?.is_some())
    }

    /// Returns the next document of the row group.
    pub(crate) fn next(
        &mut self,
        source: &SourceFile,
        fields: &Fields,
    ) -> Result<Option<(Document, Place)>, DataError> {
        let place = Place::Row(self.row);
        let Some(row) = self.row(source)? else {
            return Ok(None);
        };
        let at = At {
            path: &source.path,
            place,
        };
        let columns = row.into_columns().into_iter();
        let columns = columns.map(|(name, field)| {
            let value = value_of(field, &name, &at)?;
            Ok((name, value))
        });
        let object: Value = columns
            .collect::<Result<Vec<_>, DataError>>()?
            .into_iter()
            .collect();
        let document = Document::from_object(fields, &object, &at)?;
        if document.num_bytes() > MAX_DOCUMENT_BYTES {
            return Err(at.too_long());
        }
        Ok(Some((document, place)))
    }
}

/// Converts a field, with the keys of groups in the order of the schema.
fn value_of(field: Field, name: &str, at: &At<'_>) -> Result<Value, DataError> {
    Ok(match field {
        Field::Null => Value::from(()),
        Field::Bool(value) => value.into(),
        Field::Byte(value) => value.into(),
        Field::Short(value) => value.into(),
        Field::Int(value) => value.into(),
        Field::Long(value) => value.into(),
        Field::UByte(value) => value.into(),
        Field::UShort(value) => value.into(),
        Field::UInt(value) => value.into(),
        Field::ULong(value) => value.into(),
        Field::Float(value) if value.is_finite() => value.into(),
        Field::Double(value) if value.is_finite() => value.into(),
        Field::Float(_) | Field::Double(_) => {
            return Err(at.wrong_type(name, "finite numbers", "infinity or NaN"));
        }
        Field::Str(value) => value.into(),
        Field::Bytes(bytes) => str::from_utf8(bytes.data())
            .map_err(|_| at.not_utf8())?
            .into(),
        Field::Group(row) => {
            let entries = row.into_columns().into_iter();
            let entries = entries.map(|(key, value)| {
                let value = value_of(value, &format!("{name}.{key}"), at)?;
                Ok((key, value))
            });
            // A column exists in all rows. Where a message lacks a key, such as `tool_calls`, it contains null.
            let entries =
                entries.filter(|entry| !matches!(entry, Ok((_, value)) if value.is_none()));
            let entries: Vec<_> = entries.collect::<Result<_, DataError>>()?;
            entries.into_iter().collect()
        }
        Field::ListInternal(list) => {
            let items = list
                .elements()
                .iter()
                .map(|item| value_of(item.clone(), name, at));
            Value::from(items.collect::<Result<Vec<_>, _>>()?)
        }
        other => {
            let found = format!("{other:?}");
            let found = found.split('(').next().unwrap_or_default().to_owned();
            return Err(at.wrong_type(name, "text, numbers, lists or groups", &found));
        }
    })
}

/// Runs a part of the decoder. Turns panics, which some broken files cause, into errors.
fn caught<T>(body: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the decoder found an inconsistency".to_owned()),
    }
}

fn broken(source: &SourceFile, place: &str, problem: String) -> DataError {
    let compression = problem.split_once("Disabled feature at compile time: ");
    let problem = match compression {
        Some((_, name)) => {
            format!("its compression, {name}, is not supported; use zstd, snappy or gzip")
        }
        None => problem,
    };
    DataError::Parquet {
        path: source.path.clone(),
        place: place.to_owned(),
        problem,
    }
}
