//! The files of a data set: their order, formats and checksums.

use std::fs::{self, File};
use std::hash::Hasher;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::config::Format;
use crate::{DataConfig, DataError, Fields};

const EXTENSIONS: [(&str, Format); 6] = [
    ("txt", Format::Text),
    ("text", Format::Text),
    ("md", Format::Text),
    ("jsonl", Format::Jsonl),
    ("ndjson", Format::Jsonl),
    ("parquet", Format::Parquet),
];

/// Files of up to this many bytes together are read whole for their checksums.
const MOST_READ_BYTES: u64 = 1 << 30;

/// The levels of folders below a glob with `**` whose names are checked. Links may lead back.
const DEEPEST: usize = 40;

/// Number and size of the samples of a file that enter its checksum.
const SAMPLES: u64 = 16;
const SAMPLE_BYTES: u64 = 4 << 10;

/// A file of the data.
#[derive(Debug, Clone)]
pub(crate) struct SourceFile {
    pub(crate) path: PathBuf,
    pub(crate) format: Format,
    pub(crate) print: FilePrint,
}

/// What a position records of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FilePrint {
    /// The path from the folder of the data, with `/` between names.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Checksum of the size and of samples, in hexadecimal.
    pub(crate) checksum: String,
    /// Checksum of all bytes, in hexadecimal; `None` if all files together are large, and for older positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) contents: Option<String>,
}

impl FilePrint {
    pub(crate) fn described(&self) -> String {
        let checksum = self.contents.as_ref().unwrap_or(&self.checksum);
        format!("{} bytes with checksum {checksum}", self.bytes)
    }

    /// Returns true if the file is the recorded one, as far as both checksums tell.
    pub(crate) fn is_of(&self, saved: &Self) -> bool {
        let is_named = (&self.name, self.bytes) == (&saved.name, saved.bytes);
        is_named && self.checksum == saved.checksum && is_same(&self.contents, &saved.contents)
    }
}

impl SourceFile {
    fn new(path: PathBuf, base: &Path, config: &DataConfig) -> Result<Self, DataError> {
        let format = match config.format {
            Some(format) => format,
            None => format_of(&path)?,
        };
        if format == Format::Text && !matches!(config.fields, Fields::Text(_)) {
            let fields = format!("{:?}", config.fields.names());
            return Err(DataError::NoFields { path, fields });
        }
        let names = path.strip_prefix(base).unwrap_or(&path).components();
        let names: Vec<_> = names
            .map(|name| name.as_os_str().to_string_lossy().into_owned())
            .collect();
        let (bytes, checksum) = checksum(&path).map_err(|source| file_error(&path, source))?;
        let print = FilePrint {
            name: names.join("/"),
            bytes,
            checksum,
            contents: None,
        };
        Ok(Self {
            path,
            format,
            print,
        })
    }

    /// Opens the file, which must have the recorded size.
    pub(crate) fn open(&self) -> Result<File, DataError> {
        let opened = File::open(&self.path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (bytes, file) = opened.map_err(|source| file_error(&self.path, source))?;
        if bytes != self.print.bytes {
            return Err(DataError::Changed {
                path: self.path.clone(),
                expected: format!("{} bytes", self.print.bytes),
                found: format!("{bytes} bytes"),
            });
        }
        Ok(file)
    }
}

/// Finds the files of a configuration, in the order of their names.
pub(crate) fn find(config: &DataConfig) -> Result<Vec<SourceFile>, DataError> {
    let path = &config.path;
    let no_files = |problem: String| DataError::NoFiles {
        path: path.clone(),
        problem,
    };
    let (base, paths) = match path.metadata() {
        Ok(metadata) if metadata.is_dir() => {
            let mut paths = Vec::new();
            walk(path, &mut paths)?;
            (path.clone(), paths)
        }
        Ok(metadata) if metadata.is_file() => (
            path.parent().map(Path::to_owned).unwrap_or_default(),
            vec![path.clone()],
        ),
        Ok(_) => {
            return Err(no_files(
                "is neither a regular file nor a folder".to_owned(),
            ));
        }
        Err(source) => match path.to_str().filter(|text| text.contains(['*', '?', '['])) {
            Some(pattern) => (base_of(path), matches(pattern).map_err(no_files)?),
            None => return Err(file_error(path, source)),
        },
    };
    let files = paths
        .into_iter()
        .map(|path| SourceFile::new(path, &base, config));
    let mut files = files.collect::<Result<Vec<_>, _>>()?;
    files.sort_by(|one, other| one.print.name.cmp(&other.print.name));
    if files.is_empty() {
        return Err(no_files("contains no files".to_owned()));
    }
    let bytes = files.iter().map(|file| file.print.bytes);
    if bytes.sum::<u64>() <= MOST_READ_BYTES {
        for file in &mut files {
            let contents = checksum_of_all(&file.path);
            let contents = contents.map_err(|source| file_error(&file.path, source))?;
            file.print.contents = Some(contents);
        }
    }
    Ok(files)
}

/// Collects the regular files below a folder. Hidden ones are skipped, and linked folders are not entered.
fn walk(folder: &Path, paths: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let entries = fs::read_dir(folder).map_err(|source| file_error(folder, source))?;
    for entry in entries {
        let entry = entry.map_err(|source| file_error(folder, source))?;
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        let kind = entry
            .file_type()
            .map_err(|source| file_error(&path, source))?;
        if kind.is_dir() {
            walk(&path, paths)?;
        } else if path
            .metadata()
            .map_err(|source| file_error(&path, source))?
            .is_file()
        {
            paths.push(path);
        }
    }
    Ok(())
}

fn matches(pattern: &str) -> Result<Vec<PathBuf>, String> {
    let options = glob::MatchOptions {
        require_literal_leading_dot: true,
        ..Default::default()
    };
    let glob = Path::new(pattern);
    let base = base_of(glob);
    let is_deep = glob.components().any(|part| part.as_os_str() == "**");
    let depth = glob.components().count() - base.components().count();
    // The crate panics at other names.
    check_names(&base, if is_deep { DEEPEST } else { depth })?;
    let found =
        glob::glob_with(pattern, options).map_err(|error| format!("is not a glob: {error}"))?;
    let paths = found
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| format!("cannot be searched: {error}"))?;
    let files: Vec<_> = paths.into_iter().filter(|path| path.is_file()).collect();
    if files.is_empty() {
        return Err("matches no files".to_owned());
    }
    Ok(files)
}

/// Rejects names that are not UTF-8 in the folders that a glob searches.
fn check_names(folder: &Path, depth: usize) -> Result<(), String> {
    if depth == 0 {
        return Ok(());
    }
    let own = if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    };
    // What cannot be read is the glob's error.
    for entry in fs::read_dir(own).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else {
            let (name, own) = (name.display(), own.display());
            return Err(format!(
                "meets `{name}` in {own}, whose name is not UTF-8; rename it, or name the folder without a glob"
            ));
        };
        // A glob enters linked folders, too, but no hidden ones.
        if !name.starts_with('.') && entry.path().is_dir() {
            check_names(&entry.path(), depth - 1)?;
        }
    }
    Ok(())
}

/// Returns the part of a glob before its first pattern.
fn base_of(glob: &Path) -> PathBuf {
    let is_literal =
        |part: &Component<'_>| !part.as_os_str().to_string_lossy().contains(['*', '?', '[']);
    glob.components().take_while(is_literal).collect()
}

impl Format {
    /// Returns the format that belongs to the extension of a path, in any case; `None` for other extensions.
    pub fn of(path: &Path) -> Option<Self> {
        let found = extension(path);
        let known = EXTENSIONS.iter().find(|(extension, _)| *extension == found);
        known.map(|(_, format)| *format)
    }
}

fn extension(path: &Path) -> String {
    let extension = path.extension().unwrap_or_default();
    extension.to_string_lossy().to_lowercase()
}

fn format_of(path: &Path) -> Result<Format, DataError> {
    Format::of(path).ok_or_else(|| DataError::Extension {
        path: path.to_owned(),
        expected: EXTENSIONS.map(|(extension, _)| extension).join(", "),
        found: extension(path),
    })
}

/// Returns the size of a file, and a checksum of its size and of samples at equal distances, which include the first
/// and the last bytes.
fn checksum(path: &Path) -> std::io::Result<(u64, String)> {
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let mut hasher = XxHash3_64::new();
    hasher.write(&bytes.to_le_bytes());
    let mut sample = Vec::new();
    if bytes <= SAMPLES * SAMPLE_BYTES {
        file.take(SAMPLES * SAMPLE_BYTES).read_to_end(&mut sample)?;
        hasher.write(&sample);
    } else {
        let last = u128::from(bytes - SAMPLE_BYTES);
        for index in 0..SAMPLES {
            let start = last * u128::from(index) / u128::from(SAMPLES - 1);
            file.seek(SeekFrom::Start(start as u64))?;
            sample.clear();
            (&mut file).take(SAMPLE_BYTES).read_to_end(&mut sample)?;
            hasher.write(&sample);
        }
    }
    Ok((bytes, format!("{:016x}", hasher.finish())))
}

/// Returns a checksum of all bytes of a file.
fn checksum_of_all(path: &Path) -> std::io::Result<String> {
    let mut reader = BufReader::with_capacity(1 << 20, File::open(path)?);
    let mut hasher = XxHash3_64::new();
    loop {
        let bytes = reader.fill_buf()?;
        if bytes.is_empty() {
            return Ok(format!("{:016x}", hasher.finish()));
        }
        hasher.write(bytes);
        let len = bytes.len();
        reader.consume(len);
    }
}

/// Returns true if two checksums are equal, or one is missing.
pub(crate) fn is_same(one: &Option<String>, other: &Option<String>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => one == other,
        _ => true,
    }
}

pub(crate) fn file_error(path: &Path, source: std::io::Error) -> DataError {
    DataError::File {
        path: path.to_owned(),
        source,
    }
}
