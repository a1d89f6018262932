//! Sharding keeps the names of parameters.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

use crate::error::Error;
use crate::inspect;

/// Paths of all float tensors of a module, parameters and running states, in its order: the same
/// before and after sharding. Initializes nothing; not collective.
pub fn parameter_paths<M: Module>(module: &M) -> Vec<String> {
    let mut paths = Paths::default();
    inspect::visit(module, &mut paths);
    paths.found
}

#[derive(Default)]
struct Paths {
    path: Vec<String>,
    found: Vec<String>,
}

impl ModuleVisitor for Paths {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        self.found.push(self.path.join("."));
    }
}

/// Makes sure that `module` has the parameters that [`parameter_paths`] gave `before` it was sharded
/// or otherwise treated, under the same paths and in the same order. Not collective.
///
/// # Errors
///
/// [`Error::Names`] with the first that differs.
pub fn check_names<M: Module>(before: &[String], module: &M) -> Result<(), Error> {
    let after = parameter_paths(module);
    let none = "nothing".to_owned();
    for index in 0..before.len().max(after.len()) {
        let [expected, got] = [before, &after].map(|paths| paths.get(index).unwrap_or(&none));
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
