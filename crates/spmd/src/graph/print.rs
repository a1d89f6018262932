//! Graphs as text.

use std::fmt;
use std::hash::{Hash, Hasher};

use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};
use siphasher::sip::SipHasher13;

use super::{Graph, Node, Role, Value};
use crate::mode::DATA_AXIS;

/// One line per given value, node and update; see the [module](super) for an example. Values that a
/// node takes the memory of are marked with `!`.
impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for value in self.values.values().filter(|value| value.role.is_given()) {
            writeln!(f, "%{} {} {}", value.id.value(), value.role, Type(value))?;
        }
        for node in &self.nodes {
            writeln!(f, "{}", Line(self, node))?;
        }
        if let Some(loss) = self.loss {
            writeln!(f, "loss %{}", loss.value())?;
        }
        for update in &self.updates {
            let (into, from) = (update.into.value(), update.from.value());
            writeln!(f, "update %{into} <- %{from}")?;
        }
        Ok(())
    }
}

struct Type<'a>(&'a Value);

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
            // Where there is only one axis, it is data.
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

/// See [`Graph::fingerprint`].
pub(super) fn fingerprint(graph: &Graph) -> u64 {
    let mut hasher = SipHasher13::new();
    for value in graph.values.values() {
        (value.id, &value.shape, &value.role).hash(&mut hasher);
    }
    for node in &graph.nodes {
        node.operation.hash(&mut hasher);
        (node.phase, node.scalars, &node.shift).hash(&mut hasher);
        if let Some(collective) = &node.collective {
            (&collective.label, collective.kind, collective.stage).hash(&mut hasher);
            let reduction = collective.reduction.map(|op| op.to_string());
            (&collective.axis, reduction, collective.payload).hash(&mut hasher);
        }
    }
    for update in &graph.updates {
        (update.into, update.from).hash(&mut hasher);
    }
    for (id, data) in &graph.constants {
        (id, data.shape().to_vec(), format!("{:?}", data.dtype())).hash(&mut hasher);
        data.as_bytes().hash(&mut hasher);
    }
    hasher.finish()
}
