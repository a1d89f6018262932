//! Text that describes the changes of a pass.
//!
//! Nodes are named by the values that they write, so graphs are compared by these names instead of line by line.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write;
use std::ops::Range;
use std::sync::Arc;

use crate::graph::{CollectiveKind, Graph};

/// Explains the lines of a list of changes.
pub(super) const LEGEND: &str = "\
For each pass: the number of nodes before and after it, and the first lines that differ.
  - removed
  + added
  < the line before the pass
  > the line after it: the same values from other operands, in another shape, or marked differently
  ~ runs earlier or later
";

/// Maximum number of lines shown per pass.
const MOST_LINES: usize = 60;
/// Maximum number of joined collectives shown per pass.
const MOST_JOINED: usize = 200;

/// A printed graph, and the properties that are compared.
pub(super) struct Printed {
    name: String,
    text: String,
    /// The range of lines that are nodes. Given values come before them, and results and updates after them.
    nodes: Range<usize>,
    fingerprint: u64,
    units: BTreeMap<Arc<str>, usize>,
    /// Number of collectives of each kind.
    collectives: BTreeMap<CollectiveKind, usize>,
    /// Descriptions of the collectives that transfer several tensors.
    joined: BTreeSet<String>,
}

impl Printed {
    pub(super) fn new(name: &str, graph: &Graph) -> Self {
        let given = graph.values().filter(|value| value.role.is_given()).count();
        let mut units = BTreeMap::new();
        let parameters = graph.parameters().iter();
        for unit in parameters.filter_map(|parameter| graph.unit(&parameter.path)) {
            *units.entry(unit.into()).or_default() += 1;
        }
        let mut collectives = BTreeMap::new();
        let mut joined = BTreeSet::new();
        for (_, collective) in graph.collectives() {
            *collectives.entry(collective.kind).or_default() += 1;
            if collective.parts.len() > 1 {
                let paths: Vec<&str> = collective.parts.iter().map(|part| &*part.path).collect();
                let (kind, label) = (collective.kind, &collective.label);
                joined.insert(format!("{kind} [{label}] of {}", paths.join(", ")));
            }
        }
        Self {
            name: name.to_owned(),
            text: graph.to_string(),
            nodes: given..given + graph.nodes().len(),
            fingerprint: graph.fingerprint(),
            units,
            collectives,
            joined,
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the printed text of the graph.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Returns the lines of the nodes.
    pub(super) fn node_lines(&self) -> Vec<&str> {
        let Range { start, end } = self.nodes;
        self.text.lines().skip(start).take(end - start).collect()
    }

    /// Returns the lines that are not nodes.
    fn other_lines(&self) -> Vec<&str> {
        let Range { start, end } = self.nodes;
        let lines = self.text.lines();
        lines.clone().take(start).chain(lines.skip(end)).collect()
    }

    /// Returns a summary of the graph, which is printed for the first graph.
    pub(super) fn summary(&self) -> String {
        let nodes = self.nodes.len();
        let others = self.other_lines().len();
        format!(
            "\n{}: {nodes} nodes; {others} given values, results and updates\n",
            self.name
        )
    }

    /// Returns a line with the graph's fingerprint, which is printed for the last graph.
    pub(super) fn fingerprints(&self) -> String {
        let (name, nodes) = (&self.name, self.nodes.len());
        let fingerprint = self.fingerprint;
        format!("\nThe plan ends with {name}: {nodes} nodes, fingerprint {fingerprint:016x}\n")
    }

    /// Describes the changes since another graph.
    pub(super) fn since(&self, before: &Self) -> String {
        let nodes = Difference::of(&before.node_lines(), &self.node_lines());
        let others = Difference::of(&before.other_lines(), &self.other_lines());
        let (was, is) = (before.nodes.len(), self.nodes.len());
        let mut text = format!("\n{}, since {}: ", self.name, before.name);
        if nodes.is_none() {
            text += &format!("no node has changed, {is} nodes\n")
        } else {
            text += &format!("{was} -> {is} nodes, {}\n", nodes.counts())
        }
        if !others.is_none() {
            let counts = others.counts();
            text += &format!("  given values, results and updates: {counts}\n");
        }
        if self.collectives != before.collectives {
            let (was, is) = (before.collectives_in_words(), self.collectives_in_words());
            text += &format!("  collectives: {was} -> {is}\n");
        }
        if self.units != before.units {
            let units = self.units.iter();
            let units = units.map(|(unit, number)| match number {
                1 => format!("\"{unit}\" (1 parameter)"),
                number => format!("\"{unit}\" ({number} parameters)"),
            });
            let units: Vec<_> = units.collect();
            text += &format!("  units: {}\n", units.join(", "));
        } else if self.text == before.text {
            text += if self.fingerprint == before.fingerprint {
                "  nothing has changed\n"
            } else {
                "  only unprinted parts have changed: scalars, constants, or the parts that ranks take of a tensor\n"
            };
        }
        let joined: Vec<_> = self.joined.difference(&before.joined).collect();
        for collective in joined.iter().take(MOST_JOINED) {
            text += &format!("  joined: {collective}\n");
        }
        if joined.len() > MOST_JOINED {
            text += &format!("  .. and {} more are joined\n", joined.len() - MOST_JOINED);
        }
        let lines = || nodes.lines.iter().chain(&others.lines);
        for line in lines().take(MOST_LINES) {
            text += &format!("  {line}\n");
        }
        let left = lines().count().saturating_sub(MOST_LINES);
        if left > 0 {
            let (name, other) = (&self.name, &before.name);
            text += &format!("  .. and {left} more lines: compare {other}.txt with {name}.txt\n");
        }
        text
    }

    fn collectives_in_words(&self) -> String {
        let kinds = self.collectives.iter();
        let kinds: Vec<_> = kinds
            .map(|(kind, number)| format!("{number} {kind}"))
            .collect();
        if kinds.is_empty() {
            "none".to_owned()
        } else {
            kinds.join(", ")
        }
    }
}

/// The difference between two lists of named lines.
struct Difference {
    added: usize,
    removed: usize,
    changed: usize,
    moved: usize,
    /// The lines that differ, in the order of the second list.
    lines: Vec<String>,
}

impl Difference {
    fn of(before: &[&str], after: &[&str]) -> Self {
        let mut places: BTreeMap<&str, VecDeque<usize>> = BTreeMap::new();
        for (place, line) in before.iter().enumerate() {
            places.entry(name_of(line)).or_default().push_back(place);
        }
        let mut take = |line: &&str| places.get_mut(name_of(line))?.pop_front();
        let was_at: Vec<Option<usize>> = after.iter().map(&mut take).collect();
        let gone: BTreeSet<usize> = places.into_values().flatten().collect();
        let stays = longest_rise(&was_at);
        let mut difference = Self {
            added: 0,
            removed: gone.len(),
            changed: 0,
            moved: 0,
            lines: Vec::new(),
        };
        let mut gone = gone.into_iter().peekable();
        for (place, (line, was_at)) in after.iter().zip(&was_at).enumerate() {
            let Some(was_at) = *was_at else {
                difference.added += 1;
                difference.lines.push(format!("+ {line}"));
                continue;
            };
            let is_moved = !stays.contains(&place);
            // Removed lines are shown where they were.
            while let Some(gone) = gone.next_if(|gone| *gone < was_at && !is_moved) {
                difference.lines.push(format!("- {}", before[gone]));
            }
            if is_moved {
                difference.moved += 1;
                let moved = format!("~ {line} (line {was_at} -> {place})");
                difference.lines.push(moved);
            }
            if before[was_at] != *line {
                difference.changed += 1;
                difference.lines.push(format!("< {}", before[was_at]));
                difference.lines.push(format!("> {line}"));
            }
        }
        let rest = gone.map(|gone| format!("- {}", before[gone]));
        difference.lines.extend(rest);
        difference
    }

    fn is_none(&self) -> bool {
        self.lines.is_empty()
    }

    fn counts(&self) -> String {
        let mut text = String::new();
        let Self {
            added,
            removed,
            changed,
            moved,
            ..
        } = self;
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "{added} added, {removed} removed, {changed} changed, {moved} moved"
        );
        text
    }
}

/// Returns the name of a printed line: the values that a node writes, or the value that is given, dropped or updated.
fn name_of(line: &str) -> &str {
    let written = line.split_once(" = ").or_else(|| line.split_once(" <- "));
    match written {
        Some((name, _)) => name,
        None if line.starts_with("drop ") => line,
        None => line.split(' ').next().unwrap_or(line),
    }
}

/// Returns the positions of the longest increasing subsequence of a list; all other elements have moved.
fn longest_rise(numbers: &[Option<usize>]) -> BTreeSet<usize> {
    // For each length, the position of the smallest number that ends an increasing subsequence of that length.
    let mut ends: Vec<usize> = Vec::new();
    let mut before: Vec<Option<usize>> = vec![None; numbers.len()];
    for (place, number) in numbers.iter().enumerate() {
        if number.is_none() {
            continue;
        }
        let length = ends.partition_point(|end| numbers[*end] < *number);
        before[place] = length.checked_sub(1).map(|shorter| ends[shorter]);
        match ends.get_mut(length) {
            Some(end) => *end = place,
            None => ends.push(place),
        }
    }
    std::iter::successors(ends.last().copied(), |place| before[*place]).collect()
}

#[cfg(test)]
mod tests {
    use super::Difference;

    fn difference(before: &str, after: &str) -> (String, Vec<String>) {
        let [before, after] = [before, after].map(|text| text.split("; ").collect::<Vec<_>>());
        let difference = Difference::of(&before, &after);
        (difference.counts(), difference.lines)
    }

    #[test]
    fn lines_are_compared_by_the_values_that_they_write() {
        let before = "%1 = a(%0); %2 = b(%1); %3, %4 = c(%2); drop %2; update %0 <- %4";
        assert_eq!(
            difference(before, before),
            ("0 added, 0 removed, 0 changed, 0 moved".to_owned(), vec![])
        );
        let after = "%1 = a(%0); drop %2; %2 = b(%1!); %5 = d(%2); update %0 <- %5";
        let (counts, lines) = difference(before, after);
        assert_eq!(counts, "1 added, 1 removed, 2 changed, 1 moved");
        assert_eq!(
            lines,
            [
                "~ drop %2 (line 3 -> 1)",
                "< %2 = b(%1)",
                "> %2 = b(%1!)",
                "+ %5 = d(%2)",
                "- %3, %4 = c(%2)",
                "< update %0 <- %4",
                "> update %0 <- %5",
            ]
        );
    }

    #[test]
    fn as_few_lines_as_possible_are_moved() {
        let names = |numbers: &[usize]| {
            let lines: Vec<_> = numbers.iter().map(|n| format!("%{n} = f()")).collect();
            lines.join("; ")
        };
        let before = names(&[0, 1, 2, 3, 4, 5, 6]);
        for (after, moved) in [
            (&[6, 0, 1, 2, 3, 4, 5][..], 1),
            (&[1, 2, 3, 4, 5, 6, 0], 1),
            (&[6, 5, 4, 3, 2, 1, 0], 6),
            (&[0, 2, 1, 3, 5, 4, 6], 2),
        ] {
            let (counts, lines) = difference(&before, &names(after));
            let expected = format!("0 added, 0 removed, 0 changed, {moved} moved");
            assert_eq!(counts, expected, "{after:?}");
            assert_eq!(lines.len(), moved, "{after:?}");
        }
    }
}
