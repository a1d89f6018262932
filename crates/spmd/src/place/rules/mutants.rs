//! Faulty placement rules, derived from correct ones by seed, for tests of what detects them.

use std::cell::RefCell;

use burn_fsdp_mesh::ReduceOp;
use burn_ir::OperationIr;

use crate::graph::operation_name;
use crate::place::signature::Signature;

/// A kind of fault that a rule may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RuleMutation {
    /// The letters of two dims of an operand are swapped.
    Exchanged,
    /// Results are reduced by a different reduction.
    OtherReduction,
    /// A dim that must be whole may be sharded.
    CutOfWhole,
    /// Parts are treated as addends.
    SummedParts,
    /// The operation is declared linear in its first operand.
    Linear,
    /// An operand is whole where the others are sharded.
    WholeOperand,
}

impl RuleMutation {
    /// All kinds.
    pub const ALL: [Self; 6] = [
        Self::Exchanged,
        Self::OtherReduction,
        Self::CutOfWhole,
        Self::SummedParts,
        Self::Linear,
        Self::WholeOperand,
    ];

    /// Returns the wrong signature; `None` if the fault does not apply to the right one.
    fn of(self, signature: &Signature, seed: u64) -> Option<Signature> {
        let mut wrong = signature.clone();
        let drawn = |among: usize| seed as usize % among.max(1);
        match self {
            Self::Exchanged => {
                let input = drawn(wrong.inputs.len());
                let letters = &mut wrong.inputs.get_mut(input)?.letters;
                let dims = letters.len();
                let (a, b) = (0..dims)
                    .flat_map(|a| (a + 1..dims).map(move |b| (a, b)))
                    .find(|(a, b)| letters[*a] != letters[*b])?;
                letters.swap(a, b);
            }
            Self::OtherReduction => {
                let ops: Vec<&mut ReduceOp> = wrong.contracted.values_mut().collect();
                let op = ops.into_iter().next()?;
                *op = match op {
                    ReduceOp::Sum => ReduceOp::Mean,
                    _ => ReduceOp::Sum,
                };
            }
            Self::CutOfWhole => {
                let result = wrong.outputs.first_mut()?;
                let whole = |letters: &[Option<char>]| letters.iter().position(Option::is_none);
                let dim = whole(&result.letters)?;
                let size = result.shape[dim];
                result.letters[dim] = Some('?');
                let input = wrong.inputs.first_mut()?;
                let own = whole(&input.letters).filter(|own| input.shape[*own] == size)?;
                input.letters[own] = Some('?');
            }
            Self::SummedParts => {
                let result = wrong.outputs.first_mut()?;
                let dim = result.letters.iter().position(Option::is_some)?;
                let letter = result.letters[dim].take()?;
                wrong.contracted.insert(letter, ReduceOp::Sum);
            }
            Self::Linear => {
                let input = wrong.inputs.first()?.id;
                let is_known = wrong.linear.iter().any(|set| set.contains(&input));
                wrong.linear.push(vec![input]);
                return (!is_known).then_some(wrong);
            }
            Self::WholeOperand => {
                let letters: Vec<char> = wrong.letters();
                let has = |letter: char| {
                    let inputs = signature.inputs.iter();
                    inputs
                        .filter(move |input| input.dim_of(letter).is_some())
                        .count()
                };
                let shared = letters.into_iter().find(|letter| has(*letter) > 1)?;
                let holders = wrong.inputs.iter_mut();
                let mut holders: Vec<_> = holders
                    .filter(|input| input.dim_of(shared).is_some())
                    .collect();
                // A tensor that is read twice has the same placement for both reads, so such a rule never shards it.
                if holders.windows(2).any(|pair| pair[0].id == pair[1].id) {
                    return None;
                }
                let input = drawn(holders.len());
                let dim = holders[input].dim_of(shared)?;
                holders[input].letters[dim] = None;
            }
        }
        Some(wrong)
    }
}

/// A wrong rule.
#[derive(Debug, Clone)]
pub struct WrongRule {
    /// Name of the operation with this rule.
    pub operation: String,
    /// The kind of fault.
    pub mutation: RuleMutation,
    /// Chooses the operand at fault.
    pub seed: u64,
}

impl WrongRule {
    /// Calls a function, while this thread's rules have the fault.
    pub fn during<T>(&self, call: impl FnOnce() -> T) -> T {
        FAULT.set(Some(self.clone()));
        let result = call();
        FAULT.set(None);
        result
    }
}

thread_local! {
    static FAULT: RefCell<Option<WrongRule>> = const { RefCell::new(None) };
}

/// Returns the wrong signature if this thread's fault is in the operation's rule, and otherwise the right one.
pub(super) fn applied(operation: &OperationIr, right: Signature) -> Signature {
    FAULT.with_borrow(|fault| match fault {
        Some(fault) if fault.operation == operation_name(operation) => {
            fault.mutation.of(&right, fault.seed).unwrap_or(right)
        }
        _ => right,
    })
}
