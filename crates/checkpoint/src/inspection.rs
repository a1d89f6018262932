//! A summary of a step, for display.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::{Dtype, FORMAT_VERSION, Step, TensorKind, TrainingState};

/// The contents of a step, without the elements of its tensors. Prints as a table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// The folder of the step. Bytes that are not UTF-8 are replaced in the serialized form.
    #[serde(serialize_with = "as_text")]
    pub path: PathBuf,
    /// Version of the checkpoint format.
    pub version: u32,
    /// Number of ranks that saved the step.
    pub world_size: usize,
    /// Mesh of the ranks that saved the step, formatted for display.
    pub mesh: String,
    /// The files, in rank order.
    pub files: Vec<InspectedFile>,
    /// The tensors, in the order of the model.
    pub tensors: Vec<InspectedTensor>,
    /// State of the training run when the step was saved.
    pub training: TrainingState,
    /// The model's configuration.
    pub model: Value,
}

fn as_text<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

/// Shortens text that is too long for a table row; the JSON form is not shortened.
fn shortened(text: &str) -> String {
    const LONGEST: usize = 100;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}.. ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}

/// A file of the step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InspectedFile {
    /// Name of the file.
    pub name: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Number of parts in the file.
    pub num_parts: usize,
}

/// A tensor of the step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InspectedTensor {
    /// Name of the tensor.
    pub name: String,
    /// Purpose of the tensor.
    pub kind: TensorKind,
    /// Element type of the tensor.
    pub dtype: Dtype,
    /// Shape of the whole tensor, in elements.
    pub shape: Vec<usize>,
    /// Size of the whole tensor in bytes.
    pub bytes: u64,
    /// Layout on the ranks that saved the tensor, formatted for display.
    pub layout: String,
    /// Number of parts that store the tensor.
    pub num_parts: usize,
}

impl Inspection {
    /// Collects the contents of a step from its index.
    pub fn new(step: &Step) -> Self {
        let index = step.index();
        let mut num_parts = vec![0; index.files.len()];
        for part in index.tensors.iter().flat_map(|tensor| &tensor.parts) {
            num_parts[part.file] += 1;
        }
        let files = index.files.iter().zip(num_parts);
        let files = files.map(|(file, num_parts)| InspectedFile {
            name: file.name.clone(),
            bytes: file.bytes,
            num_parts,
        });
        let tensors = index.tensors.iter().map(|tensor| InspectedTensor {
            name: tensor.name.clone(),
            kind: tensor.kind,
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            bytes: tensor.num_bytes(),
            layout: tensor.layout.to_string(),
            num_parts: tensor.parts.len(),
        });
        Self {
            path: step.path().to_owned(),
            version: FORMAT_VERSION,
            world_size: index.world_size,
            mesh: index.mesh.to_string(),
            files: files.collect(),
            tensors: tensors.collect(),
            training: index.training.clone(),
            model: index.model.clone(),
        }
    }

    /// Counts the tensors of one kind, with their elements and bytes.
    pub fn totals(&self, kind: TensorKind) -> Totals {
        let mut totals = Totals::default();
        for tensor in self.tensors.iter().filter(|tensor| tensor.kind == kind) {
            totals.num_tensors += 1;
            totals.num_elements += burn_fsdp_mesh::num_elements(&tensor.shape).unwrap_or(0) as u64;
            totals.bytes += tensor.bytes;
        }
        totals
    }
}

/// The numbers of tensors, elements and bytes of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Totals {
    /// Number of tensors.
    pub num_tensors: usize,
    /// Number of elements.
    pub num_elements: u64,
    /// Number of bytes.
    pub bytes: u64,
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let training = &self.training;
        writeln!(f, "{}", self.path.display())?;
        writeln!(
            f,
            "format version {}, saved by {} ranks ({})",
            self.version, self.world_size, self.mesh
        )?;
        write!(f, "step {}, seed {}, ", training.step, training.seed)?;
        // Not every program counts passes. This project's command stores its position in a section.
        if training.data.epoch > 0 {
            write!(f, "epoch {}, ", training.data.epoch)?;
        }
        writeln!(f, "sample {}", training.data.sample)?;
        for (title, value) in [
            ("learning rate", &training.learning_rate),
            ("optimizer", &training.optimizer),
            ("model", &self.model),
        ] {
            if !value.is_null() {
                writeln!(f, "{title}: {}", shortened(&value.to_string()))?;
            }
        }
        if let Some(loss_scale) = &training.loss_scale {
            writeln!(f, "loss scale: {}", loss_scale.scale)?;
        }
        for (name, value) in &training.sections {
            writeln!(
                f,
                "{:?}: {}",
                shortened(name),
                shortened(&value.to_string())
            )?;
        }
        writeln!(f)?;
        for file in &self.files {
            let InspectedFile {
                name,
                bytes,
                num_parts,
            } = file;
            writeln!(f, "{name}: {bytes} bytes, {num_parts} parts")?;
        }
        writeln!(f)?;
        let (name, layout) = (self.width(|t| &t.name), self.width(|t| &t.layout));
        writeln!(
            f,
            "{:<name$}  {:<15}  {:<6}  {:>14}  {:<layout$}  {:>5}  shape",
            "tensor", "kind", "dtype", "bytes", "layout", "parts"
        )?;
        for tensor in &self.tensors {
            writeln!(
                f,
                "{:<name$}  {:<15}  {:<6}  {:>14}  {:<layout$}  {:>5}  {:?}",
                shown(&tensor.name),
                tensor.kind,
                tensor.dtype.to_string(),
                tensor.bytes,
                tensor.layout,
                tensor.num_parts,
                tensor.shape
            )?;
        }
        writeln!(f)?;
        for kind in [
            TensorKind::Parameter,
            TensorKind::Buffer,
            TensorKind::OptimizerState,
        ] {
            let totals = self.totals(kind);
            writeln!(
                f,
                "{kind:<15}  {:>6} tensors  {:>16} elements  {:>16} bytes",
                totals.num_tensors, totals.num_elements, totals.bytes
            )?;
        }
        Ok(())
    }
}

impl Inspection {
    /// Returns the number of characters in the widest text of a column.
    fn width(&self, text: impl Fn(&InspectedTensor) -> &String) -> usize {
        let widths = self.tensors.iter().map(|t| shown(text(t)).chars().count());
        widths.max().unwrap_or(0).max("tensor".len())
    }
}

/// Escapes the control characters of a name, which could move a terminal's cursor.
fn shown(name: &str) -> String {
    name.chars()
        .flat_map(|c| {
            if c.is_control() {
                c.escape_default().collect::<Vec<_>>()
            } else {
                vec![c]
            }
        })
        .collect()
}
