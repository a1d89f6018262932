//! Pictures of graphs: computation by units, and collectives, from top to bottom in schedule order.

use std::collections::BTreeMap;

use burn_ir::TensorId;

use super::changes::Printed;
use super::groups::Group;
use crate::graph::{Graph, Phase, Value};

const WIDTH: usize = 1120;
const TOP: usize = 76;
const ROW: usize = 24;
const BOX: usize = 18;
/// Left edge and width of the boxes of collectives.
const TRAVELS: (usize, usize) = (92, 330);
/// Left edge and width of the boxes of computation.
const COMPUTES: (usize, usize) = (500, 470);
/// Maximum number of groups in a picture.
const MOST_ROWS: usize = 4000;
/// Maximum number of lines in the tooltip of a box.
const MOST_LINES: usize = 40;

/// Draws a graph. The tooltip of a box lists its nodes.
pub(super) fn draw(printed: &Printed, graph: &Graph, groups: &[Group]) -> String {
    let lines = printed.node_lines();
    let shown = &groups[..groups.len().min(MOST_ROWS)];
    let height = TOP + (shown.len() + 2) * ROW;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    svg += &head(printed.name(), graph);
    svg += &phases(shown);
    svg += &arrows(graph, shown);
    for (row, group) in shown.iter().enumerate() {
        svg += &row_of(graph, group, row, &lines);
    }
    let left = groups.len() - shown.len();
    if left > 0 {
        let more = format!(".. and {left} more groups, listed in the text");
        svg += &text(COMPUTES.0, middle(shown.len()) + 4, &more, "");
    }
    svg + "</svg>\n"
}

fn head(name: &str, graph: &Graph) -> String {
    let (nodes, ranks) = (graph.nodes().len(), graph.num_ranks());
    let title = match ranks {
        1 => format!("{name}: {nodes} nodes"),
        ranks => format!("{name}: {nodes} nodes on each of {ranks} ranks"),
    };
    let mut head = text(16, 24, &title, " font-size=\"16\"");
    head += &text(16, 58, "nodes", "");
    head += &text(TRAVELS.0, 58, "travels", " font-weight=\"bold\"");
    head += &text(COMPUTES.0, 58, "is computed", " font-weight=\"bold\"");
    let kept = "kept for backward";
    head += &text(COMPUTES.0 + COMPUTES.1 + 16, 58, kept, " fill=\"#3b6ea5\"");
    let mut x = COMPUTES.0 + 90;
    for phase in [Phase::Forward, Phase::Backward, Phase::Optimizer] {
        let (pale, strong) = colors(phase);
        head += &format!(
            "<rect x=\"{x}\" y=\"48\" width=\"12\" height=\"12\" fill=\"{pale}\" stroke=\"{strong}\"/>\n"
        );
        head += &text(x + 17, 58, &phase.to_string(), "");
        x += 90;
    }
    head
}

/// Draws a bar next to the rows of each phase.
fn phases(groups: &[Group]) -> String {
    let mut bars = String::new();
    let mut row = 0;
    for chunk in groups.chunk_by(|left, right| left.phase == right.phase) {
        let (y, height) = (TOP + row * ROW, chunk.len() * ROW);
        let (_, strong) = colors(chunk[0].phase);
        bars += &format!(
            "<rect x=\"74\" y=\"{y}\" width=\"6\" height=\"{height}\" fill=\"{strong}\"><title>{}</title></rect>\n",
            chunk[0].phase
        );
        row += chunk.len();
    }
    bars
}

/// Draws the box of a group.
fn row_of(graph: &Graph, group: &Group, row: usize, lines: &[&str]) -> String {
    let nodes: Vec<usize> = group.nodes(graph).map(|(index, _)| index).collect();
    let said = match &group.collective {
        Some(name) => travelling(graph, group, name),
        None => format!("{}: {}", unit_name(group), operations(graph, group)),
    };
    let (x, width) = match group.collective {
        Some(_) => TRAVELS,
        None => COMPUTES,
    };
    let (pale, strong) = colors(group.phase);
    let pale = match group.collective {
        Some(_) => "#fbe9b7",
        None => pale,
    };
    let told = nodes.iter().take(MOST_LINES);
    let mut told: Vec<&str> = told
        .filter_map(|index| lines.get(*index).copied())
        .collect();
    if nodes.len() > MOST_LINES {
        told.push("..");
    }
    let y = middle(row) - BOX / 2;
    let range = match (nodes.first(), nodes.last()) {
        (Some(first), Some(last)) if first != last => format!("{first}-{last}"),
        (first, _) => first.map_or_else(String::new, ToString::to_string),
    };
    // Letters are about 6 pixels wide.
    let fitting = shortened(&said, (width - 12) / 6);
    format!(
        "<g><title>{}</title>\n<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{BOX}\" rx=\"3\" fill=\"{pale}\" \
         stroke=\"{strong}\"/>\n{}{}</g>\n",
        escaped(&format!("{said}\n{}", told.join("\n"))),
        text(x + 6, middle(row) + 4, &fitting, ""),
        text(16, middle(row) + 4, &range, " fill=\"#808080\""),
    )
}

/// Describes the collectives of a group.
fn travelling(graph: &Graph, group: &Group, name: &str) -> String {
    let collectives = group
        .nodes(graph)
        .filter_map(|(_, node)| node.collective.as_ref());
    let collectives: Vec<_> = collectives.collect();
    let bytes: usize = collectives.iter().map(|of| of.num_bytes()).sum();
    let what = match collectives.as_slice() {
        [one] => one.label.to_string(),
        several => format!("{}, {} operations", unit_name(group), several.len()),
    };
    format!("{name} {}, {what}", size(bytes))
}

/// Counts the operations of a group by name, the most frequent first.
fn operations(graph: &Graph, group: &Group) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for (_, node) in group.nodes(graph) {
        let name = node.name();
        let name = name.rsplit_once('.').map_or(&*name, |(_, last)| last);
        *counts.entry(name.to_owned()).or_default() += 1;
    }
    let total: usize = counts.values().sum();
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| usize::MAX - count);
    let counts = counts.into_iter().map(|(name, count)| match count {
        1 => name,
        count => format!("{count} {name}"),
    });
    let counts: Vec<_> = counts.collect();
    match total {
        1 => counts.join(", "),
        total => format!("{total} operations, {}", counts.join(", ")),
    }
}

/// Draws arrows for the inputs and outputs of collectives, and for the values that forward keeps for backward.
fn arrows(graph: &Graph, groups: &[Group]) -> String {
    let mut writers: BTreeMap<TensorId, usize> = BTreeMap::new();
    let mut kept: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    let mut given: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for (row, group) in groups.iter().enumerate() {
        let mut read: Vec<TensorId> = Vec::new();
        for (_, node) in group.nodes(graph) {
            read.extend(node.inputs());
            writers.extend(node.outputs().map(|id| (id, row)));
        }
        read.sort_unstable();
        read.dedup();
        for id in read {
            let Some(from) = writers.get(&id).copied().filter(|from| *from != row) else {
                continue;
            };
            let bytes = graph.value(id).map_or(0, Value::num_bytes);
            let other = &groups[from];
            let is_kept = (other.phase, group.phase) == (Phase::Forward, Phase::Backward);
            let arrows = match (&other.collective, &group.collective) {
                (None, None) if is_kept => &mut kept,
                (None, None) => continue,
                _ => &mut given,
            };
            *arrows.entry((from, row)).or_default() += bytes;
        }
    }
    let given = given.into_iter().map(|((from, to), bytes)| {
        let between = TRAVELS.0 + TRAVELS.1;
        let end = |row: usize| match groups[row].collective {
            Some(_) => between,
            None => COMPUTES.0,
        };
        let (x, to_x) = (end(from), end(to));
        let (bend, back) = if x == to_x {
            (between + 24, between + 24)
        } else {
            (to_x, x)
        };
        let (y, to_y) = (middle(from), middle(to));
        let path = format!("M{x},{y} C{bend},{y} {back},{to_y} {to_x},{to_y}");
        arrow(&path, "#a07818", &format!("{} travel", size(bytes)))
    });
    let kept = kept.into_iter().map(|((from, to), bytes)| {
        let x = COMPUTES.0 + COMPUTES.1;
        // Longer arrows bend farther out.
        let out = x + 16 + 150 * (to - from) / groups.len().max(1);
        let (y, to_y) = (middle(from), middle(to));
        let path = format!("M{x},{y} C{out},{y} {out},{to_y} {x},{to_y}");
        arrow(&path, "#3b6ea5", &format!("{} kept", size(bytes)))
    });
    given.chain(kept).collect()
}

fn arrow(path: &str, color: &str, title: &str) -> String {
    format!(
        "<path d=\"{path}\" fill=\"none\" stroke=\"{color}\" opacity=\"0.6\"><title>{title}</title></path>\n"
    )
}

/// Returns the vertical center of a row.
fn middle(row: usize) -> usize {
    TOP + row * ROW + ROW / 2
}

/// Returns the pale and the strong color of a phase.
fn colors(phase: Phase) -> (&'static str, &'static str) {
    match phase {
        Phase::Forward => ("#d6e6f5", "#3b6ea5"),
        Phase::Backward => ("#fbe0cb", "#c46a2c"),
        Phase::Optimizer => ("#d9eed4", "#4d8f42"),
    }
}

fn unit_name(group: &Group) -> &str {
    match group.unit.as_str() {
        "" => "the whole model",
        unit => unit,
    }
}

fn size(bytes: usize) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let mut size = bytes as f64;
    let mut unit = "bytes";
    for larger in UNITS {
        if size < 1024.0 {
            break;
        }
        (size, unit) = (size / 1024.0, larger);
    }
    match unit {
        "bytes" => format!("{bytes} bytes"),
        unit => format!("{size:.1} {unit}"),
    }
}

fn text(x: usize, y: usize, text: &str, style: &str) -> String {
    format!(
        "<text x=\"{x}\" y=\"{y}\"{style}>{}</text>\n",
        escaped(text)
    )
}

fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() > most {
        text.chars()
            .take(most.saturating_sub(2))
            .chain("..".chars())
            .collect()
    } else {
        text.to_owned()
    }
}

fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\n' => escaped.push('\n'),
            // XML does not allow these characters.
            letter if letter.is_control() => escaped.push(' '),
            letter => escaped.push(letter),
        }
    }
    escaped
}
