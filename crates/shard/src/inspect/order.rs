//! The recorded order of operations.

use burn::module::Module;

use crate::error::Error;
use crate::inspect;
use crate::schedule::Operation;

/// The recorded order of a module's operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// The operations, one per line, in the order in which every rank issues them.
    pub operations: Vec<String>,
    /// The hash of the order, which is equal on ranks with equal orders.
    pub hash: u64,
}

impl std::fmt::Display for Order {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "order {:016x}", self.hash)?;
        for operation in &self.operations {
            writeln!(f, "  {operation}")?;
        }
        Ok(())
    }
}

/// Returns the number of backwards of a sharded module whose [audit](crate::ShardPolicy::audit) completed and passed.
/// If only children of the module were sharded, the first one counts.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn num_audited<M: Module>(module: &M) -> Result<u64, Error> {
    Ok(inspect::root_of(module)?.num_audited())
}

/// Returns the order of gathers and reductions recorded in the last complete step; empty before the first. If only
/// children of the module were sharded, it is the order of the first one.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn order<M: Module>(module: &M) -> Result<Order, Error> {
    let root = inspect::root_of(module)?;
    let (operations, hash) = root.order();
    let name = |index: usize| root.unit(index).map_or("?".to_owned(), |unit| unit.label());
    let operations = operations.iter().map(|operation| match *operation {
        Operation::UnshardForward(unit) => format!("forward unshard {}", name(unit)),
        Operation::UnshardBackward(unit) => format!("backward unshard {}", name(unit)),
        Operation::Reduce(unit) => format!("reduce {}", name(unit)),
        Operation::Finish => "finish".to_owned(),
    });
    Ok(Order {
        operations: operations.collect(),
        hash,
    })
}
