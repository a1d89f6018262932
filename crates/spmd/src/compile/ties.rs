//! Fields that share a parameter: clones of one `Param`, with the same id. The graph has it once, under the path of the
//! first field.

use std::iter;

use burn::module::ParamId;

use crate::Precision;
use crate::error::Error;
use crate::trace::{OptimizerGroups, ParameterSpec};

/// Returns the paths of all fields that share a parameter, beginning with the first field.
pub(super) fn paths(spec: &ParameterSpec) -> impl Iterator<Item = &str> {
    let all = iter::once(&spec.path).chain(&spec.tied);
    all.map(AsRef::as_ref)
}

/// Rejects options that treat the fields of one parameter differently.
///
/// # Errors
///
/// [`Error::Tied`] for a group that names another field but not the first, and for fields that would compute in
/// different types.
pub(super) fn check(
    named: &[(ParamId, ParameterSpec)],
    optimizers: &OptimizerGroups,
    precision: &Precision,
) -> Result<(), Error> {
    for (id, spec) in named {
        let group = optimizers.of(*id, &spec.path);
        let compute = precision.compute_of(&spec.path, spec.dtype);
        for path in &spec.tied {
            let other = optimizers.of(*id, path);
            let problem = if other != group && other != 0 {
                "but an optimizer group has the second and not the first, which decides the group; name the first"
            } else if precision.compute_of(path, spec.dtype) != compute {
                "but would compute in different types; name both in `Precision::full_in`, or cast the value where it is \
                 used"
            } else {
                continue;
            };
            return Err(Error::Tied {
                first: spec.path.to_string(),
                second: path.to_string(),
                problem,
            });
        }
    }
    Ok(())
}
