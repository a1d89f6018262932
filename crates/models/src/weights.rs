//! Weights on disk, for all models.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use burn::store::ModuleSnapshot;
use burn::store::burn_pack::Tensor as PackedTensor;
use burn::tensor::{Bytes, DType, Device, Shape};

use crate::error::{HEAD, store_error};
use crate::header::{Header, TensorEntry};
use crate::stored::{Elements, OpenedFile, StoredTensor, StoredType};
use crate::weight_folder::WeightFolder;
use crate::{Architecture, GptConfig, ModelError, ParameterSpec};

/// The weights of one model in safetensors, with the names and layout of its [table](Architecture::parameters). They
/// are in one file, or in a folder in Hugging Face's format, which may have several files and an index.
///
/// The files must have all weights of the model and no weights of another model. Tensors that follow from the sizes
/// are ignored, and so are heads for other tasks. A tied head may be present in addition to the embedding if both are
/// equal, or instead of it.
///
/// The only constructor is [`open`](Self::open). It reads the headers and compares them with the model.
#[derive(Debug)]
pub struct WeightsFile<A: Architecture = GptConfig> {
    path: PathBuf,
    /// The tensors of the model, by path in its module.
    tensors: BTreeMap<String, StoredTensor>,
    /// The tied head, if the files have it in addition to the embedding.
    head: Option<TiedHead>,
    config: A,
    num_bytes_read: AtomicU64,
    num_requests: AtomicU64,
    num_bytes_requested: AtomicU64,
}

/// The most elements of whole rows that are read at once for some of their columns.
const MAX_ELEMENTS: usize = 1 << 20;

/// A tensor that must equal a parameter.
#[derive(Debug)]
struct TiedHead {
    tensor: StoredTensor,
    /// Path of the parameter in the module.
    table: String,
    /// The parameter's name in files.
    table_name: String,
}

/// A tensor in a file, as described by its header.
#[derive(Debug)]
struct Found {
    file: OpenedFile,
    /// Position of the tensors' data in the file.
    start: u64,
    entry: TensorEntry,
    /// The tensor's name in the file.
    name: String,
}

/// Number of elements of a tied head that are compared with the embedding at once, and number of such comparisons when
/// a file is opened. Elements that are read later are compared before they are used.
const COMPARED: (usize, usize) = (1 << 14, 16);

impl<A: Architecture> WeightsFile<A> {
    /// Checks that a file or folder has the weights of the configured model.
    ///
    /// The content is not trusted: headers are read with bounds on every number, and no file outside the folder is
    /// opened.
    ///
    /// # Errors
    ///
    /// If the configuration is not valid, if a file cannot be read or is not well-formed, or if a tensor is missing,
    /// unexpected, or has a different shape or an unsupported type.
    pub fn open(path: impl Into<PathBuf>, config: A) -> Result<Self, ModelError> {
        config.validate()?;
        let path = path.into();
        let mut found = found_in(&path, &config)?;
        let tied = config.tied_head();
        let mut head = None;
        if let Some([name, table]) = tied
            && let Some(entry) = found.remove(name)
        {
            // If the files have only the head, it is also the embedding. The writer decides which of the two names is
            // kept.
            if found.contains_key(table) {
                head = Some(entry);
            } else {
                found.insert(table.to_owned(), entry);
            }
        }
        let (mut tensors, mut tied_head) = (BTreeMap::new(), None);
        let mut missing = None;
        for spec in config.parameters() {
            let Some(entry) = found.remove(&spec.name) else {
                missing = missing.or(Some(spec));
                continue;
            };
            if tied.is_some_and(|[_, table]| table == spec.name)
                && let Some(head) = head.take()
            {
                let as_head = ParameterSpec {
                    name: HEAD.to_owned(),
                    ..spec.clone()
                };
                tied_head = Some(TiedHead {
                    tensor: stored_tensor(&path, as_head, head)?,
                    table: spec.path.clone(),
                    table_name: spec.name.clone(),
                });
            }
            let tensor = stored_tensor(&path, spec, entry)?;
            tensors.insert(tensor.spec.path.clone(), tensor);
        }
        if let Some(spec) = missing {
            return Err(missing_tensor(path, &config, spec, &found));
        }
        if let Some((_, extra)) = found.pop_first() {
            let problem = reason_against(&config, &extra.name);
            return Err(unexpected(path, extra, problem));
        }
        let opened = Self {
            path,
            tensors,
            head: tied_head,
            config,
            num_bytes_read: AtomicU64::new(0),
            num_requests: AtomicU64::new(0),
            num_bytes_requested: AtomicU64::new(0),
        };
        opened.compare_head()?;
        Ok(opened)
    }

    /// Compares parts of a tied head with the embedding.
    fn compare_head(&self) -> Result<(), ModelError> {
        let Some(head) = &self.head else {
            return Ok(());
        };
        let (block, times) = COMPARED;
        let len = head.tensor.num_elements();
        let stride = len.div_ceil(times).max(block);
        for start in (0..len).step_by(stride) {
            self.read(&head.table, start..(start + block).min(len))?;
        }
        Ok(())
    }

    /// Returns the configuration of the model.
    pub fn config(&self) -> A {
        self.config
    }

    /// Reads the elements `range` of the parameter at `path` in the module as 32-bit floats, for example the shard of
    /// one rank. The range counts in row-major order of the module's shape.
    ///
    /// If files have the matrix transposed, each of its rows there has a piece of the range. Pieces that are far
    /// apart are read one by one. Otherwise many pieces are read with one request, together with the bytes between
    /// them. A request has at most one mebibyte, unless a single piece is larger.
    ///
    /// # Errors
    ///
    /// [`ModelError::NoParameter`] for a path or a range that the model does not have. Also if a file can no longer
    /// be read or has changed since it was opened, or if a tied head in the file has other values there.
    pub fn read(&self, path: &str, range: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let stored = self.tensors.get(path);
        let is_inside =
            |stored: &&StoredTensor| range.start <= range.end && range.end <= stored.num_elements();
        let Some(stored) = stored.filter(is_inside) else {
            return Err(ModelError::NoParameter {
                parameter: path.to_owned(),
                range,
                num_elements: stored.map(StoredTensor::num_elements),
            });
        };
        let values = self.read_stored(stored, range.clone())?;
        match &self.head {
            Some(head) if head.table == path => {
                if are_same(&self.read_stored(&head.tensor, range)?, &values) {
                    Ok(values)
                } else {
                    Err(self.other_head(head))
                }
            }
            _ => Ok(values),
        }
    }

    /// Reads these columns of the matrix at `path` in the module, `[rows, columns]`, in row-major order. If files have the
    /// matrix transposed, the columns are rows there, and only they are read. Otherwise whole rows are read, some at a time.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read). Also [`ModelError::NoParameter`] for a parameter that is not a matrix.
    pub fn read_columns(&self, path: &str, columns: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let stored = self.tensors.get(path);
        let shape = stored.map(|stored| stored.spec.module_shape());
        let (Some(stored), Some(&[rows, width])) = (stored, shape.as_deref()) else {
            return Err(ModelError::NoParameter {
                parameter: path.to_owned(),
                range: columns,
                num_elements: stored.map(StoredTensor::num_elements),
            });
        };
        if columns.start > columns.end || columns.end > width {
            return Err(ModelError::NoParameter {
                parameter: path.to_owned(),
                range: columns,
                num_elements: Some(stored.num_elements()),
            });
        }
        let mut values = Vec::with_capacity(rows * columns.len());
        if stored.spec.is_transposed {
            let range = columns.start * rows..columns.end * rows;
            let read = self.counted(stored.read_in_file_order(range))?;
            for row in 0..rows {
                values.extend(read.iter().skip(row).step_by(rows));
            }
            return Ok(values);
        }
        let at_once = (MAX_ELEMENTS / width.max(1)).max(1);
        for start in (0..rows).step_by(at_once) {
            let end = (start + at_once).min(rows);
            for row in self
                .read(path, start * width..end * width)?
                .chunks(width.max(1))
            {
                values.extend_from_slice(&row[columns.clone()]);
            }
        }
        Ok(values)
    }

    fn read_stored(
        &self,
        stored: &StoredTensor,
        range: Range<usize>,
    ) -> Result<Vec<f32>, ModelError> {
        self.counted(stored.read(range))
    }

    /// Counts the traffic of a read, and returns its values.
    fn counted(&self, elements: io::Result<Elements>) -> Result<Vec<f32>, ModelError> {
        let elements = elements.map_err(|source| ModelError::File {
            path: self.path.clone(),
            source,
        })?;
        let Elements { values, traffic } = elements;
        for (count, more) in [
            (&self.num_bytes_read, traffic.num_bytes_taken),
            (&self.num_requests, traffic.num_requests),
            (&self.num_bytes_requested, traffic.num_bytes),
        ] {
            count.fetch_add(more, Ordering::Relaxed);
        }
        Ok(values)
    }

    /// Returns the error for a tied head whose values differ from the embedding's.
    fn other_head(&self, head: &TiedHead) -> ModelError {
        ModelError::UnexpectedTensor {
            path: self.path.clone(),
            name: head.tensor.spec.name.clone(),
            found: head.tensor.spec.shape.clone(),
            problem: format!(
                ": `tie_word_embeddings` in config.json is true, so the head is {}, but their values differ; remove \
                 the wrong one, or set it to false if the model has a separate head",
                head.table_name
            ),
        }
    }

    /// Returns the number of bytes of parameter elements that were read since the file was opened.
    pub fn num_bytes_read(&self) -> u64 {
        self.num_bytes_read.load(Ordering::Relaxed)
    }

    /// Returns the number of read requests for tensors since the file was opened.
    pub fn num_requests(&self) -> u64 {
        self.num_requests.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes in all read requests, including the bytes between pieces of rows.
    pub fn num_bytes_requested(&self) -> u64 {
        self.num_bytes_requested.load(Ordering::Relaxed)
    }

    /// Reads the weights into a new model.
    ///
    /// # Errors
    ///
    /// If a file can no longer be read or has changed since it was opened, or if a tied head has other values than the
    /// embedding.
    pub fn load(&self, device: &Device) -> Result<A::Model, ModelError> {
        let mut model = self.config.blank(device)?;
        let mut tensors = Vec::new();
        for (path, stored) in &self.tensors {
            let values = self.read(path, 0..stored.num_elements())?;
            let bytes = Bytes::from_elems(values);
            let shape = Shape::from(stored.spec.module_shape());
            tensors.push(PackedTensor::new(
                path.clone(),
                DType::F32,
                shape,
                None,
                bytes,
            ));
        }
        let result = model.apply(tensors, None, None, false);
        if let Some(error) = result.errors.first() {
            return Err(store_error(&self.path, error));
        }
        match result.missing.first() {
            None => Ok(model),
            Some(missing) => {
                let problem = format!("parameter {missing:?} is not in the model's table");
                Err(store_error(&self.path, &problem))
            }
        }
    }
}

/// Returns true for equal numbers, and for NaNs with the same bits, because the head of a diverged model is still
/// tied.
fn are_same(head: &[f32], table: &[f32]) -> bool {
    let is_same = |(head, table): (&f32, &f32)| head == table || head.to_bits() == table.to_bits();
    head.len() == table.len() && head.iter().zip(table).all(is_same)
}

fn read_header(path: &Path) -> Result<(OpenedFile, Header), ModelError> {
    let file_error = |source| ModelError::File {
        path: path.to_owned(),
        source,
    };
    let malformed = |problem| ModelError::MalformedWeights {
        path: path.to_owned(),
        problem,
    };
    // This check comes before opening, because opening a pipe would wait for a writer.
    let metadata = path.metadata().map_err(file_error)?;
    if !metadata.is_file() {
        return Err(malformed("not a regular file".to_owned()));
    }
    let opened = OpenedFile::of(path).map_err(file_error)?;
    let mut file = File::open(path).map_err(file_error)?;
    let header = Header::read(&mut file, metadata.len())
        .map_err(file_error)?
        .map_err(malformed)?;
    Ok((opened, header))
}

/// Returns the tensors of a file or folder, by the table's name.
fn found_in<A: Architecture>(
    path: &Path,
    config: &A,
) -> Result<BTreeMap<String, Found>, ModelError> {
    let folder = if path.is_dir() {
        Some(WeightFolder::open(path)?)
    } else {
        None
    };
    let files = match &folder {
        Some(folder) => folder.files(),
        None => vec![path.to_owned()],
    };
    // Files may lack tensors that the model does not need, even if an index lists them. Either a tied head or its
    // embedding suffices.
    let tied = config.tied_head();
    let is_needed = |name: &str| {
        let known = config.name_of(name.to_owned());
        known.is_some_and(|known| !tied.is_some_and(|names| names.contains(&known.as_str())))
    };
    let mut found = BTreeMap::new();
    for file in &files {
        let (opened, header) = read_header(file)?;
        if let Some(folder) = &folder {
            folder.check(file, header.tensors.keys(), is_needed)?;
        }
        for (name, entry) in header.tensors {
            let Some(known) = config.name_of(name.clone()) else {
                continue;
            };
            let tensor = Found {
                file: opened.clone(),
                start: header.data_start,
                entry,
                name,
            };
            if let Some(earlier) = found.insert(known, tensor) {
                let problem = "; it occurs twice, under two names or in two files; remove one";
                return Err(unexpected(path.to_owned(), earlier, problem.to_owned()));
            }
        }
    }
    Ok(found)
}

/// Returns the error for a tensor that the model does not have.
fn unexpected(path: PathBuf, found: Found, problem: String) -> ModelError {
    ModelError::UnexpectedTensor {
        path,
        name: found.name,
        found: found.entry.shape,
        problem,
    }
}

/// Returns the remedy for a tensor that the model does not have, after the reason if the name shows it.
fn reason_against<A: Architecture>(config: &A, name: &str) -> String {
    let table = config.parameters();
    let has = |name: &str| {
        let known = config.name_of(name.to_owned());
        known.is_some_and(|known| table.iter().any(|spec| spec.name == known))
    };
    let parts: Vec<&str> = name.split('.').collect();
    let number = parts.iter().position(|part| part.parse::<usize>().is_ok());
    let in_first = number.map(|number| {
        let mut parts = parts.clone();
        parts[number] = "0";
        parts.join(".")
    });
    let reason = if in_first.as_deref().is_some_and(has) {
        ", which has fewer blocks".to_owned()
    } else if name
        .strip_suffix("bias")
        .is_some_and(|module| has(&format!("{module}weight")))
    {
        ", which has no bias there".to_owned()
    } else {
        String::new()
    };
    format!("{reason}; load a file that was written for this configuration")
}

/// Returns the error for a parameter that the files lack or have under a longer name.
fn missing_tensor<A: Architecture>(
    path: PathBuf,
    config: &A,
    spec: ParameterSpec,
    found: &BTreeMap<String, Found>,
) -> ModelError {
    let wrapped = found.values().find_map(|tensor| {
        let mut dots = tensor.name.match_indices('.');
        let (end, _) = dots.find(|(dot, _)| {
            let rest = tensor.name[dot + 1..].to_owned();
            config.name_of(rest).as_ref() == Some(&spec.name)
        })?;
        Some((tensor.name.clone(), tensor.name[..=end].to_owned()))
    });
    match wrapped {
        Some((found, prefix)) => ModelError::WrappedNames {
            path,
            name: spec.name,
            found,
            prefix,
        },
        None => ModelError::MissingTensor {
            path,
            name: spec.name,
            expected: spec.shape,
        },
    }
}

/// Returns a parameter's tensor in a file, if it has the model's shape and a supported type.
fn stored_tensor(
    path: &Path,
    spec: ParameterSpec,
    found: Found,
) -> Result<StoredTensor, ModelError> {
    let path = path.to_owned();
    let Found {
        file, start, entry, ..
    } = found;
    if entry.shape != spec.shape {
        return Err(ModelError::WrongShape {
            path,
            name: spec.name,
            expected: spec.shape,
            found: entry.shape,
        });
    }
    match StoredType::named(&entry.dtype) {
        Some(dtype) => Ok(StoredTensor {
            file,
            start: start + entry.start(),
            dtype,
            spec,
        }),
        None => Err(ModelError::WrongDtype {
            path,
            name: spec.name,
            found: entry.dtype,
        }),
    }
}
