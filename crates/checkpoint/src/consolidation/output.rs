//! The tensors to write, and their distribution over files.

use std::collections::HashSet;

use super::config::PlainTensor;
use crate::tensor::check_tensor;
use crate::{Error, Step, TensorEntry};

/// A tensor of a step, with its name and orientation in the output.
#[derive(Debug, Clone)]
pub(super) struct Output<'a> {
    pub(super) entry: &'a TensorEntry,
    pub(super) plain: PlainTensor,
}

impl Output<'_> {
    /// Returns the shape in the output.
    pub(super) fn shape(&self) -> Vec<usize> {
        let mut shape = self.entry.shape.clone();
        if self.plain.is_transposed {
            shape.reverse();
        }
        shape
    }
}

/// Collects the tensors of the model for which `write_as` returns a name.
pub(super) fn wanted(
    step: &Step,
    write_as: impl Fn(&TensorEntry) -> Option<PlainTensor>,
) -> Result<Vec<Output<'_>>, Error> {
    let wrong = |expected: &str, got: String| Error::Argument {
        argument: "write_as",
        expected: expected.to_owned(),
        got,
    };
    let mut names = HashSet::new();
    let mut outputs = Vec::new();
    for entry in step.index().tensors.iter() {
        let plain = if entry.kind.is_model() {
            write_as(entry)
        } else {
            None
        };
        let Some(plain) = plain else { continue };
        check_tensor(&plain.name, &entry.shape, entry.dtype)
            .map_err(|problem| wrong("a name", format!("{:?}: {problem}", plain.name)))?;
        if plain.is_transposed && entry.shape.len() != 2 {
            let got = format!("{:?} of shape {:?}", entry.name, entry.shape);
            return Err(wrong(
                "a name without transposition unless the tensor has two dims",
                got,
            ));
        }
        if !names.insert(plain.name.clone()) {
            let got = format!("{:?} again, for {:?}", plain.name, entry.name);
            return Err(wrong("a different name for each tensor", got));
        }
        outputs.push(Output { entry, plain });
    }
    if outputs.is_empty() {
        let got = format!("none for all in {}", step.path().display());
        Err(wrong("a name for at least one tensor of the model", got))
    } else {
        Ok(outputs)
    }
}

/// Distributes tensors over files in order. A file is closed before it would exceed `max_size`.
pub(super) fn split<'a, 'b>(
    tensors: &'a [Output<'b>],
    max_size: Option<u64>,
) -> Vec<Vec<&'a Output<'b>>> {
    let mut shards: Vec<Vec<&Output<'_>>> = Vec::new();
    let mut size = 0u64;
    for tensor in tensors {
        let with_it = size.saturating_add(tensor.entry.num_bytes());
        match shards.last_mut() {
            Some(shard) if max_size.is_none_or(|most| with_it <= most) => {
                shard.push(tensor);
                size = with_it;
            }
            _ => {
                shards.push(vec![tensor]);
                size = tensor.entry.num_bytes();
            }
        }
    }
    shards
}

/// Returns the bytes of all tensors together.
pub(super) fn total_size<'a, 'b: 'a>(tensors: impl IntoIterator<Item = &'a Output<'b>>) -> u64 {
    tensors
        .into_iter()
        .map(|tensor| tensor.entry.num_bytes())
        .sum()
}
