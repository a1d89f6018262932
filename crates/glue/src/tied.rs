//! Tied parameters, which several fields of a model share, in steps on disk. Each is saved once, under the path of its
//! first field, with the other paths in the metadata. A step may have several of these names if the saving model had
//! separate parameters, or only another name if its first field had another path.

use burn_fsdp_checkpoint::{Region, Step, TensorEntry, TensorSpec};
use serde_json::Value;

use crate::error::CheckpointError;

/// The other paths of a parameter, in the metadata of its tensor.
const TIED: &str = "tied";

/// Returns the description of a parameter with its other paths, if it has any.
pub(crate) fn with_paths<S: AsRef<str>>(spec: TensorSpec, tied: &[S]) -> TensorSpec {
    match tied {
        [] => spec,
        tied => {
            let paths = tied.iter().map(|path| Value::from(path.as_ref()));
            spec.with(TIED, paths.collect::<Vec<_>>())
        }
    }
}

/// The names under which a step has a parameter; the first one is read.
pub(crate) struct Names(Vec<String>);

impl Names {
    /// Finds the names under which `step` has the parameter with the path `path` and the other paths `tied`. If the
    /// step has none of them, but lists one as another path of a parameter, the result is that parameter's name.
    /// Otherwise it is `path`, which the step lacks.
    pub(crate) fn of<S: AsRef<str>>(step: &Step, path: &str, tied: &[S]) -> Self {
        let own: Vec<_> = std::iter::once(path)
            .chain(tied.iter().map(AsRef::as_ref))
            .collect();
        let is_there = |path: &&&str| {
            let found = step.tensor(path);
            found.is_ok_and(|tensor| tensor.kind.is_model())
        };
        let there = own.iter().filter(is_there);
        let mut names: Vec<_> = there.map(|path| (*path).to_owned()).collect();
        if names.is_empty() {
            let mut models = step.index().tensors.iter();
            let is_it = |tensor: &&TensorEntry| {
                let mut others = others(tensor);
                others.any(|other| own.contains(&other))
            };
            names.extend(models.find(is_it).map(|tensor| tensor.name.clone()));
        }
        if names.is_empty() {
            names.push(path.to_owned());
        }
        Self(names)
    }

    /// Returns the name that is read.
    pub(crate) fn first(&self) -> &str {
        &self.0[0]
    }

    /// Returns all names.
    pub(crate) fn all(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Reads a region of the parameter.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Tied`] if the step has different values there under another name; damage.
    pub(crate) fn read(&self, step: &Step, region: &Region) -> Result<Vec<u8>, CheckpointError> {
        let bytes = step.read(self.first(), region)?;
        for other in self.all().skip(1) {
            if step.read(other, region)? != bytes {
                return Err(CheckpointError::Tied {
                    first: self.first().to_owned(),
                    second: other.to_owned(),
                });
            }
        }
        Ok(bytes)
    }
}

fn others(tensor: &TensorEntry) -> impl Iterator<Item = &str> {
    let paths = tensor.metadata.get(TIED).and_then(Value::as_array);
    paths.into_iter().flatten().filter_map(Value::as_str)
}
