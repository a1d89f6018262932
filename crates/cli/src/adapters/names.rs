//! The names of matrices: how targets select them, and how `peft` names a set of them.

use std::collections::{BTreeMap, BTreeSet};

use burn_fsdp::internals::mesh::Pattern;
use burn_fsdp_models::ParameterSpec;

use super::error::AdapterError;

/// The target that selects all matrices, as in peft.
const ALL: &str = "all-linear";

/// Number of names in an error.
const NAMED: usize = 4;

/// Returns the name of a parameter's module in the model's files.
pub(crate) fn module_of(spec: &ParameterSpec) -> &str {
    spec.name.rsplit_once('.').map_or("", |(module, _)| module)
}

/// Returns true if a target selects a matrix: by the end of its module's name in files, or as a pattern of paths.
fn is_target(target: &str, spec: &ParameterSpec) -> bool {
    target == ALL
        || Pattern::new(format!("**.{target}")).matches(module_of(spec))
        || Pattern::new(target).prefix_of(&spec.path).is_some()
}

/// Returns the matrices that a target of `flag` selects.
///
/// # Errors
///
/// [`AdapterError::NoMatch`] if there are none.
pub(crate) fn selected<'a>(
    flag: &'static str,
    target: &str,
    matrices: &[&'a ParameterSpec],
) -> Result<Vec<&'a ParameterSpec>, AdapterError> {
    let all = matrices.iter().filter(|spec| is_target(target, spec));
    let selected: Vec<_> = all.copied().collect();
    if selected.is_empty() {
        Err(AdapterError::NoMatch {
            flag,
            target: target.chars().take(100).collect(),
            nearest: nearest(target, matrices),
        })
    } else {
        Ok(selected)
    }
}

/// Returns the names with as many parts as a target that differ from it in the fewest characters.
fn nearest(target: &str, matrices: &[&ParameterSpec]) -> String {
    let parts = target.split('.').count();
    let names = matrices.iter().flat_map(|spec| {
        let module = module_of(spec);
        let path = spec.path.rsplit_once('.').map_or("", |(path, _)| path);
        [suffix(module, parts), suffix(path, parts)]
    });
    let mut names: Vec<_> = names.collect::<BTreeSet<_>>().into_iter().collect();
    names.sort_by_key(|name| distance(name, target));
    names.truncate(NAMED);
    names.join(", ")
}

/// Returns the last `parts` names of a dotted name.
fn suffix(name: &str, parts: usize) -> &str {
    let mut dots = name.rmatch_indices('.').map(|(at, _)| at);
    dots.nth(parts.saturating_sub(1))
        .map_or(name, |at| &name[at + 1..])
}

/// Returns the number of characters to insert, remove or replace to turn one text into another (Levenshtein).
fn distance(one: &str, other: &str) -> usize {
    // A target may have any length; names are short.
    let other: Vec<char> = other.chars().take(200).collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (line, a) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = line + 1;
        for (column, b) in other.iter().enumerate() {
            let replaced = diagonal + usize::from(a != *b);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(row[column] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}

/// Returns the shortest ends of names that select exactly the `chosen` modules among `all`, as peft selects modules.
pub(crate) fn ends_of<'a>(chosen: &BTreeSet<&'a str>, all: &[&str]) -> BTreeSet<&'a str> {
    let is_exact = |end: &str| {
        let mut ended = all.iter().filter(|module| is_end(end, module));
        ended.all(|module| chosen.contains(module))
    };
    let shortest = |module: &&'a str| {
        let module: &'a str = module;
        let parts = module.split('.').count();
        let mut ends = (1..=parts).map(|parts| suffix(module, parts));
        ends.find(|end| is_exact(end)).unwrap_or(module)
    };
    chosen.iter().map(shortest).collect()
}

/// Returns true if a module's name is `end` or ends with it, as in peft.
pub(crate) fn is_end(end: &str, module: &str) -> bool {
    let before = module.strip_suffix(end);
    before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Groups modules by a number, and returns the shortest ends of names for each group except `usual`, with the number.
pub(crate) fn numbered<'a, T: PartialEq + Copy>(
    numbers: &BTreeMap<&'a str, T>,
    usual: T,
) -> Vec<(&'a str, T)> {
    let all: Vec<_> = numbers.keys().copied().collect();
    let unusual = numbers.iter().filter(|(_, number)| **number != usual);
    let ends = unusual.map(|(module, number)| {
        let same = numbers.iter().filter(|(_, other)| *other == number);
        let same = same.map(|(module, _)| *module).collect();
        let ends = ends_of(&same, &all);
        let end = ends.into_iter().find(|end| is_end(end, module));
        (end.unwrap_or(*module), *number)
    });
    let mut ends: Vec<_> = ends.collect();
    ends.sort_by_key(|(end, _)| *end);
    ends.dedup_by_key(|(end, _)| *end);
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(path: &str, module: &str) -> ParameterSpec {
        ParameterSpec {
            path: format!("{path}.weight"),
            name: format!("{module}.weight"),
            shape: vec![2, 3],
            is_transposed: true,
        }
    }

    #[test]
    fn targets_are_ends_of_names_or_patterns_of_paths() {
        let all = [
            matrix(
                "layers.0.attention.query",
                "model.layers.0.self_attn.q_proj",
            ),
            matrix("layers.0.mlp.down", "model.layers.0.mlp.down_proj"),
            matrix(
                "layers.1.attention.query",
                "model.layers.1.self_attn.q_proj",
            ),
            matrix("layers.1.mlp.down", "model.layers.1.mlp.down_proj"),
        ];
        let all: Vec<_> = all.iter().collect();
        for (target, number) in [
            ("q_proj", 2),
            ("self_attn.q_proj", 2),
            ("layers.0.self_attn.q_proj", 1),
            ("model.layers.0.self_attn.q_proj", 1),
            ("all-linear", 4),
            ("*_proj", 4),
            ("layers.0.**", 2),
            ("layers.1", 2),
            ("layers.*.mlp", 2),
            ("**.query.weight", 2),
        ] {
            let found = selected("--lora-targets", target, &all).map(|found| found.len());
            assert_eq!(found.ok(), Some(number), "{target}");
        }
        for (target, near) in [
            ("proj", "are q_proj, "),
            ("q_prj", "are q_proj, "),
            ("self_attn.k_proj", "are self_attn.q_proj, "),
            ("", "the nearest are down, "),
        ] {
            let error = selected("--lora-targets", target, &all).expect_err(target);
            assert!(error.to_string().contains(near), "{error}");
        }
    }

    #[test]
    fn ends_select_exactly_the_chosen_modules() {
        let all = ["a.0.x.p", "a.0.y.p", "a.1.x.p", "a.1.y.p", "head"];
        let of = |chosen: &[&'static str]| {
            let ends = ends_of(&chosen.iter().copied().collect(), &all);
            ends.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(of(&all[..4]), ["p"]);
        assert_eq!(of(&["a.0.x.p", "a.1.x.p"]), ["x.p"]);
        assert_eq!(of(&["a.0.x.p"]), ["0.x.p"]);
        assert_eq!(of(&["a.0.x.p", "a.1.x.p", "a.0.y.p"]), ["0.y.p", "x.p"]);
        let numbers = BTreeMap::from([("a.0.x.p", 1), ("a.0.y.p", 2), ("a.1.x.p", 3)]);
        assert_eq!(numbered(&numbers, 1), [("1.x.p", 3), ("y.p", 2)]);
    }
}
