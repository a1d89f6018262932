//! The frozen base of adapters in 8 or 4 bits: the matrices that it applies to, where they are cut, and the agreement of
//! all ranks that they can be quantized.

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;

use burn::tensor::{DType, Tensor};
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_mesh::{Cut, Partition};

use super::detached::Adapters;
use crate::base_bits::{BaseBits, Quantized};
use crate::error::Error;
use crate::policy::ShardPolicy;
use crate::survey::Found;
use crate::unit::Unit;

/// Returns the paths of the matrices that the factors among `parameters` adapt.
pub(super) fn adapted(parameters: &[Found]) -> HashSet<&str> {
    let adapters = parameters
        .iter()
        .filter_map(|found| found.factor_of.as_ref());
    adapters.map(|adapter| adapter.path.as_str()).collect()
}

/// Rejects a policy that quantizes a base, if neither the policy nor the module has `adapters`.
pub(super) fn expect_adapters(policy: &ShardPolicy, adapters: &Adapters) -> Result<(), Error> {
    if policy.base_bits.is_none() || policy.attaches_adapters() || !adapters.is_empty() {
        return Ok(());
    }
    Err(rejected(
        "set together with `lora` or `dora`, or for a module that `apply_lora` has adapted, because only the frozen base of adapters has fewer bits",
        "set without adapters".to_owned(),
    ))
}

/// Returns where a matrix may be cut: at blocks of the base, unless the policy selects other cuts.
pub(super) fn cut(cut: Cut, bits: Option<BaseBits>) -> Cut {
    match (cut, bits) {
        (Cut::Elements, Some(_)) => Cut::Multiples(BaseBits::BLOCK),
        (cut, _) => cut,
    }
}

/// Returns the form in which ranks hold a matrix with this partition.
///
/// # Errors
///
/// [`Error::Option`] for a cut inside a block, and for a type that has no such form; [`Error::Mesh`].
pub(super) fn form(
    bits: BaseBits,
    found: &Found,
    partition: Partition,
) -> Result<Quantized, Error> {
    if !matches!(found.dtype, DType::F32 | DType::BF16 | DType::F16) {
        return Err(rejected(
            "set for a base in f32, bf16 or f16; cast the module first",
            format!("set for `{}` in {:?}", found.path, found.dtype),
        ));
    }
    let mut begins = partition.non_empty().map(|(_, range)| range.start);
    if let Some(start) = begins.find(|start| start % BaseBits::BLOCK != 0) {
        return Err(rejected(
            "set for matrices cut at multiples of 64 elements, their blocks; omit `cut` for them, or use \
             `cut_of` with `Cut::Multiples(64)`",
            format!("set for `{}`, which is cut at element {start}", found.path),
        ));
    }
    Ok(Quantized::new(bits, found.dtype, partition)?)
}

/// Returns the error for the base of a module's own adapter that is trained, too.
pub(super) fn trained(found: &Found) -> Error {
    rejected(
        "set for frozen matrices; freeze them, as `apply_lora` does",
        format!("set for `{}`, which is trained", found.path),
    )
}

/// The first matrix of this rank that cannot be quantized. Sharding continues, so all ranks issue the same operations.
#[derive(Clone, Default)]
pub(super) struct Unquantizable(Rc<RefCell<Option<String>>>);

impl Unquantizable {
    /// Returns the elements of the parameter in `slot` in the form in which they are held.
    pub(super) fn held(&self, unit: &Unit, slot: usize, elements: Tensor<1>) -> Tensor<1> {
        let (held, error) = unit.packed(slot, elements);
        if let Some(Error::Option { got, .. }) = error {
            self.0.borrow_mut().get_or_insert(got);
        }
        held
    }

    /// Returns an error on all ranks if any rank has such a matrix. Collective.
    pub(super) fn agree(&self, group: &ProcessGroup) -> Result<(), Error> {
        let own = self.0.borrow().clone().unwrap_or_default();
        let notes = group.exchange("base in fewer bits", own.into_bytes())?;
        let found = notes.iter().enumerate().find(|(_, note)| !note.is_empty());
        let Some((rank, note)) = found else {
            return Ok(());
        };
        let got = String::from_utf8_lossy(note);
        Err(rejected(
            "set for finite weights; repair them, or keep them in their own type, without `base_in`",
            format!("{got} (on rank {rank})"),
        ))
    }
}

fn rejected(expected: &'static str, got: String) -> Error {
    Error::Option {
        option: "base_in",
        expected,
        got,
    }
}
