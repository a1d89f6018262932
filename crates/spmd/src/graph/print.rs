//! Graphs as text.

use std::fmt;

use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};

use super::Graph;
use super::node::Node;
use super::value::{Role, Value};
use crate::ranks::DATA_AXIS;

/// Prints one line per given value, node and update, and one for the loss; see the [module](super) for an example. A
/// `!` marks an input whose memory the node takes.
impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for value in self.values.values().filter(|value| value.role.is_given()) {
            writeln!(f, "%{} {} {}", value.id.value(), value.role, Type(value))?;
        }
        for node in &self.nodes {
            writeln!(f, "{}", Line(self, node))?;
        }
        if let Some(loss) = self.results.loss {
            writeln!(f, "loss %{}", loss.value())?;
        }
        for update in &self.updates {
            let (into, from) = (update.into.value(), update.from.value());
            writeln!(f, "update %{into} <- %{from}")?;
        }
        Ok(())
    }
}

/// Type and shape of a value, as graphs print them.
pub(crate) struct Type<'a>(pub(crate) &'a Value);

impl fmt::Display for Type<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = format!("{:?}", self.0.dtype).to_lowercase();
        write!(f, "{dtype}{:?}", self.0.shape)
    }
}

struct Line<'a>(&'a Graph, &'a Node);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(graph, node) = self;
        if let OperationIr::Drop(tensor) = &node.operation {
            return write!(f, "drop %{}", tensor.id.value());
        }
        let outputs: Vec<_> = node
            .outputs()
            .map(|id| format!("%{}", id.value()))
            .collect();
        let inputs: Vec<_> = node.operation.inputs().map(input).collect();
        write!(
            f,
            "{} = {}({})",
            outputs.join(", "),
            node.name(),
            inputs.join(", ")
        )?;
        for output in node.outputs() {
            match graph.values.get(&output) {
                Some(value) => write!(f, " {}", Type(value))?,
                None => write!(f, " undeclared")?,
            }
        }
        write!(f, " {}", node.phase)?;
        if let Some(collective) = &node.collective {
            write!(f, " [{}]", collective.label)?;
            // The data axis is the default and is not printed.
            if *collective.axis != *DATA_AXIS {
                write!(f, " on {}", collective.axis)?;
            }
        }
        let role = node.outputs().find_map(|id| gradient(graph, id));
        match role {
            Some(path) => write!(f, " gradient of {path}"),
            None => Ok(()),
        }
    }
}

fn gradient(graph: &Graph, id: TensorId) -> Option<&str> {
    match &graph.values.get(&id)?.role {
        Role::Gradient(path) => Some(path),
        _ => None,
    }
}

fn input(tensor: &TensorIr) -> String {
    let mark = match tensor.status {
        TensorStatus::ReadWrite => "!",
        _ => "",
    };
    format!("%{}{mark}", tensor.id.value())
}
