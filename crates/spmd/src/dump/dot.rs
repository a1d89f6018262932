//! Graphs in the language of Graphviz: every operation, and the values that it reads.

use std::collections::{BTreeMap, BTreeSet};

use burn_ir::TensorId;

use super::groups::Group;
use crate::graph::{Graph, Node, Phase, Type};

/// Draws a graph. Groups are framed, and drops are omitted.
pub(super) fn draw(name: &str, graph: &Graph, groups: &[Group]) -> String {
    let mut text = format!(
        "digraph {} {{\n  graph [label={}, labelloc=t, fontname=\"sans-serif\"];\n  \
         node [shape=box, style=filled, fontname=\"sans-serif\", fontsize=10];\n",
        quoted(name),
        quoted(&format!("{name}: {} nodes", graph.nodes().len())),
    );
    let mut writers: BTreeMap<TensorId, usize> = BTreeMap::new();
    let mut given: BTreeSet<TensorId> = BTreeSet::new();
    for (number, group) in groups.iter().enumerate() {
        let label = quoted(&format!("{} {}", group.phase, group.unit));
        text += &format!("  subgraph cluster_{number} {{\n    label={label};\n");
        for (index, node) in group.nodes(graph) {
            text += &format!(
                "    n{index} [label={}, fillcolor=\"{}\"];\n",
                quoted(&label_of(graph, index, node)),
                color(node)
            );
            given.extend(node.inputs().filter(|id| !writers.contains_key(id)));
            writers.extend(node.outputs().map(|id| (id, index)));
        }
        text += "  }\n";
    }
    for id in given {
        let label = match graph.value(id) {
            Some(value) => format!("%{} {}\n{}", id.value(), value.role, Type(value)),
            None => format!("%{} undeclared", id.value()),
        };
        let label = quoted(&label);
        text += &format!("  v{} [shape=ellipse, label={label}];\n", id.value());
    }
    for (index, node) in groups.iter().flat_map(|group| group.nodes(graph)) {
        for id in node.inputs().collect::<BTreeSet<_>>() {
            text += &match writers.get(&id) {
                Some(writer) => format!("  n{writer} -> n{index};\n"),
                None => format!("  v{} -> n{index};\n", id.value()),
            };
        }
    }
    text + "}\n"
}

fn label_of(graph: &Graph, index: usize, node: &Node) -> String {
    let mut label = format!("{index} {}", node.name());
    if let Some(collective) = &node.collective {
        label += &format!("\n{}", collective.label);
    }
    for value in node.outputs().take(4).filter_map(|id| graph.value(id)) {
        label += &format!("\n%{} {}", value.id.value(), Type(value));
    }
    let left = node.outputs().count().saturating_sub(4);
    if left > 0 {
        label += &format!("\n.. and {left} more");
    }
    label
}

/// Returns the color of a node: one for each phase, and one for collectives.
fn color(node: &Node) -> &'static str {
    match (&node.collective, node.phase) {
        (Some(_), _) => "#f4c95d",
        (None, Phase::Forward) => "#d6e6f5",
        (None, Phase::Backward) => "#fbe0cb",
        (None, Phase::Optimizer) => "#d9eed4",
    }
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for letter in text.chars() {
        match letter {
            '\n' => quoted += "\\n",
            '"' | '\\' => quoted.extend(['\\', letter]),
            letter if letter.is_control() => quoted.push(' '),
            letter => quoted.push(letter),
        }
    }
    quoted + "\""
}
