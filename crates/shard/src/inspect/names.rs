//! The paths of a module's parameters, which sharding preserves.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use crate::error::Error;
use crate::inspect;
use crate::path::{self, Location};

/// Returns the paths of a module's float tensors, both parameters and running states, in module order. Sharding does
/// not change them, except for the factors of adapters. Initializes nothing; not collective.
pub fn parameter_paths<M: Module>(module: &M) -> Vec<String> {
    let mut paths = Paths::default();
    inspect::visit(module, &mut paths);
    paths.found
}

#[derive(Default)]
struct Paths {
    found: Vec<String>,
}

impl path::Visitor for Paths {
    fn float<const D: usize>(&mut self, place: &Location, _param: &Param<Tensor<D>>) {
        self.found.push(place.path());
    }
}

/// Checks that `module` has the parameters that [`parameter_paths`] returned `before` it was sharded or otherwise
/// changed, under the same paths and in the same order. Factors of adapters are ignored. Not collective.
///
/// # Errors
///
/// [`Error::Names`] with the first path that differs.
pub fn check_names<M: Module>(before: &[String], module: &M) -> Result<(), Error> {
    let is_own = |path: &&String| {
        let is_factor = |name: &str| path.ends_with(&format!(".{name}"));
        ![path::FACTOR_A, path::FACTOR_B, path::MAGNITUDE]
            .into_iter()
            .any(is_factor)
    };
    let after = parameter_paths(module);
    let after: Vec<_> = after.iter().filter(is_own).cloned().collect();
    let before: Vec<_> = before.iter().filter(is_own).cloned().collect();
    let none = "nothing".to_owned();
    for index in 0..before.len().max(after.len()) {
        let [expected, got] = [&before, &after].map(|paths| paths.get(index).unwrap_or(&none));
        if expected != got {
            return Err(Error::Names {
                index,
                expected: expected.clone(),
                got: got.clone(),
            });
        }
    }
    Ok(())
}
