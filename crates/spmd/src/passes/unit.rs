//! Units of a model, derived from paths or patterns, and the pass that assigns them.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_fsdp_mesh::Pattern;

use crate::error::Error;
use crate::graph::Graph;
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The units of a model: the modules whose parameters are gathered, freed and reduced together.
///
/// By default, units are derived from parameter paths. A parameter in a list of modules belongs to the innermost
/// element that consists of several modules, or otherwise to the outermost element. Examples are `blocks.3` for
/// `blocks.3.fc.weight`, `stages.0.blocks.17` for `stages.0.blocks.17.conv.weight`, and `layers.2` for
/// `layers.2.weight`. Every other parameter belongs to the first module below the modules that contain all parameters
/// of the model: `head` for `head.weight`, and `net.head` for `net.head.weight` if everything is in `net`.
///
/// With [patterns](Self::matching), units are the modules that the user names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Units {
    /// Patterns of the modules that are units; `None` if they are derived from the paths.
    patterns: Option<Vec<Pattern>>,
}

impl Units {
    /// Creates units that are derived from the paths, as described in [`Units`].
    pub fn by_path() -> Self {
        Self::default()
    }

    /// Creates units from the modules that match one of these patterns. A parameter belongs to the innermost of them
    /// that contains it. All other parameters form one unit, the root. Without any pattern, the whole model is one
    /// unit.
    ///
    /// ```
    /// use burn_fsdp_spmd::passes::Units;
    /// use burn_fsdp_spmd::passes::schedule::Options;
    ///
    /// let mut options = Options::default();
    /// options.units = Units::matching(["net.conv*", "**.blocks.*"]);
    /// ```
    pub fn matching<P: Into<Pattern>>(patterns: impl IntoIterator<Item = P>) -> Self {
        Self {
            patterns: Some(patterns.into_iter().map(Into::into).collect()),
        }
    }

    /// Returns the unit of each parameter.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`] for a pattern that matches no module.
    pub fn of<'a>(
        &self,
        paths: impl IntoIterator<Item = &'a Arc<str>>,
    ) -> Result<BTreeMap<Arc<str>, Arc<str>>, Error> {
        let paths: Vec<&Arc<str>> = paths.into_iter().collect();
        let Some(patterns) = &self.patterns else {
            let wrapper = wrapper(&paths);
            let units = paths.iter().map(|path| {
                let unit = below(wrapper, path);
                ((*path).clone(), Arc::from(unit))
            });
            return Ok(units.collect());
        };
        for pattern in patterns {
            let matches = |path: &&Arc<str>| pattern.prefix_of(module(path)).is_some();
            if !paths.iter().any(matches) {
                let mut known: Vec<_> = paths.iter().map(|path| module(path)).collect();
                known.dedup();
                known.truncate(12);
                return Err(Error::UnknownName {
                    what: "module that is a unit",
                    name: pattern.to_string(),
                    known: known.join(", "),
                });
            }
        }
        let units = paths.into_iter().map(|path| {
            let module = module(path);
            let found = patterns.iter();
            let found = found.filter_map(|pattern| pattern.prefix_of(module));
            let unit = found.max_by_key(|unit| unit.len()).unwrap_or("");
            (path.clone(), Arc::from(unit))
        });
        Ok(units.collect())
    }
}

/// The pass that stores the unit of every parameter in the graph, for passes that gather weights or join collectives.
#[derive(Debug, Clone, Default)]
pub struct AssignUnits(pub Units);

impl GraphTransform for AssignUnits {
    fn id(&self) -> PassId {
        PassId::AssignUnits
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::Regather, PassId::Bucket]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let parameters = graph.parameters().iter();
        let parameters = parameters.filter(|parameter| !parameter.is_buffer);
        let units = self.0.of(parameters.map(|parameter| &parameter.path))?;
        graph.set_units(units);
        Ok(graph)
    }
}

/// Returns the unit of a parameter in a graph; if none was assigned, derives it from the path.
pub(super) fn unit_in<'a>(graph: &'a Graph, path: &'a str) -> &'a str {
    graph.unit(path).unwrap_or_else(|| unit_of(path))
}

/// Returns the unit of a parameter, derived only from its path, see [`Units`].
///
/// ```
/// use burn_fsdp_spmd::passes::unit_of;
///
/// assert_eq!(unit_of("blocks.3.fc.weight"), "blocks.3");
/// assert_eq!(unit_of("model.layers.0.norm.gamma"), "model.layers.0");
/// assert_eq!(unit_of("stages.0.blocks.17.conv.weight"), "stages.0.blocks.17");
/// assert_eq!(unit_of("blocks.3.mlp.layers.0.weight"), "blocks.3");
/// assert_eq!(unit_of("head.weight"), "head");
/// assert_eq!(unit_of("weight"), "");
/// ```
pub fn unit_of(path: &str) -> &str {
    below(0, path)
}

/// Returns the unit of a parameter by its path, in a model whose paths all begin with the same `wrapper` names.
fn below(wrapper: usize, path: &str) -> &str {
    let ends: Vec<usize> = path.match_indices('.').map(|(end, _)| end).collect();
    let names: Vec<&str> = path.split('.').collect();
    let is_number = |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit());
    let numbers: Vec<usize> = (0..names.len().saturating_sub(1))
        .filter(|index| is_number(names[*index]))
        .collect();
    // An element of several modules has at least two names after it: a module and its parameter.
    let composite = numbers.iter().rev().find(|index| names.len() - **index > 2);
    if let Some(index) = composite.or(numbers.first()) {
        return &path[..ends[*index]];
    }
    match ends.get(wrapper).or(ends.last()) {
        Some(end) => &path[..*end],
        None => "",
    }
}

/// Counts the leading names that all paths share, excluding the last name of each.
fn wrapper(paths: &[&Arc<str>]) -> usize {
    let Some((first, rest)) = paths.split_first() else {
        return 0;
    };
    let common = |a: &str, b: &str| -> usize {
        let pairs = a.split('.').zip(b.split('.'));
        pairs.take_while(|(a, b)| a == b).count()
    };
    let own = module(first);
    let longest = if own.is_empty() {
        0
    } else {
        own.split('.').count()
    };
    rest.iter()
        .fold(longest, |least, path| least.min(common(own, module(path))))
}

/// Returns the module that contains a parameter.
fn module(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(module, _)| module)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::Units;

    fn units(units: &Units, paths: &[&str]) -> Vec<String> {
        let paths: Vec<Arc<str>> = paths.iter().map(|path| Arc::from(*path)).collect();
        let found = units.of(&paths).unwrap();
        paths.iter().map(|path| found[path].to_string()).collect()
    }

    #[test]
    fn a_wrapper_is_not_a_unit() {
        let of = |paths: &[&str]| units(&Units::by_path(), paths);
        let wrapped = of(&["net.one.weight", "net.one.bias", "net.two.weight"]);
        assert_eq!(wrapped, ["net.one", "net.one", "net.two"]);
        let twice = of(&["a.net.one.weight", "a.net.blocks.0.fc.weight"]);
        assert_eq!(twice, ["a.net.one", "a.net.blocks.0"]);
        assert_eq!(of(&["net.one.weight", "scale"]), ["net", ""]);
        assert_eq!(of(&["head.weight", "head.bias"]), ["head", "head"]);
        assert_eq!(of(&["weight", "bias"]), ["", ""]);
    }

    #[test]
    fn units_can_be_chosen_by_the_user() {
        let paths = [
            "embed.weight",
            "net.blocks.0.fc.weight",
            "net.blocks.1.fc.weight",
        ];
        let of = |patterns: &[&str]| units(&Units::matching(patterns.iter().copied()), &paths);
        assert_eq!(of(&["net"]), ["", "net", "net"]);
        assert_eq!(
            of(&["net", "**.blocks.*"]),
            ["", "net.blocks.0", "net.blocks.1"]
        );
        assert_eq!(of(&["e*"]), ["embed", "", ""]);
        assert_eq!(of(&[]), ["", "", ""]);
        let none = Units::matching(["conv*"]).of(&[Arc::from("head.weight")]);
        let error = none.unwrap_err().to_string();
        assert!(error.contains("conv*") && error.contains("head"), "{error}");
    }
}
