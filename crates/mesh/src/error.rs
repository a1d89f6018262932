//! The errors of meshes, layouts and partitions.

/// An invalid mesh, layout or partition, or an invalid argument to one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A mesh has no axes.
    #[error("a mesh needs at least one axis; for ranks in a line use Mesh::line(\"shard\", n)")]
    NoAxes,

    /// A mesh axis has no ranks.
    #[error("mesh axis \"{axis}\" has size 0; give every axis at least one rank")]
    EmptyAxis {
        /// Name of the axis.
        axis: String,
    },

    /// Two mesh axes have the same name.
    #[error("mesh axis \"{axis}\" is named twice; give every axis its own name")]
    DuplicateAxis {
        /// The name that occurs more than once.
        axis: String,
    },

    /// A mesh has more ranks than fit in a `usize`.
    #[error("mesh {mesh} has more ranks than fit in a usize; make its axes smaller")]
    TooManyRanks {
        /// The requested axes, as `name=size` joined by `x`.
        mesh: String,
    },

    /// The mesh does not have this axis.
    #[error("mesh {mesh} has no axis \"{axis}\"; use one of its axes")]
    UnknownAxis {
        /// The requested name of an axis.
        axis: String,
        /// The mesh, formatted for display.
        mesh: String,
    },

    /// The rank is outside the mesh.
    #[error("rank {rank} is not in mesh {mesh}; its ranks are 0 to {last}", last = num_ranks - 1)]
    RankOutOfRange {
        /// The requested rank.
        rank: usize,
        /// Number of ranks in the mesh.
        num_ranks: usize,
        /// The mesh, formatted for display.
        mesh: String,
    },

    /// The requested owner is not a valid shard index.
    #[error("shard {owner} cannot own a tensor in {num_shards} shards; choose an owner from 0 to {last}", last = num_shards - 1)]
    NoSuchShard {
        /// The index of the requested owner.
        owner: usize,
        /// Number of shards, at least 1.
        num_shards: usize,
    },

    /// A coordinate does not have one index per axis, or an index is outside its axis.
    #[error(
        "coordinate {coordinate:?} is not in mesh {mesh}; give one index per axis, each less than the axis size"
    )]
    CoordinateOutOfRange {
        /// The requested coordinate.
        coordinate: Vec<usize>,
        /// The mesh, formatted for display.
        mesh: String,
    },

    /// A partition has no shards.
    #[error("cannot cut {num_elements} elements into 0 shards; give at least one")]
    NoShards {
        /// Number of elements of the tensor.
        num_elements: usize,
    },

    /// A tensor's padded size does not fit in a `usize`.
    #[error(
        "a tensor of shape {shape:?} in {num_shards} shards has more elements than fit in a usize; use a smaller \
         shape or fewer shards"
    )]
    TooManyElements {
        /// Shape of the tensor.
        shape: Vec<usize>,
        /// Number of shards.
        num_shards: usize,
    },

    /// A tensor or a mesh cannot have this layout.
    #[error("layout {got} is invalid; expected {expected}")]
    InvalidLayout {
        /// A description of a valid layout.
        expected: String,
        /// The requested layout, formatted for display.
        got: String,
    },

    /// Two partitions are not of the same tensor.
    #[error(
        "cannot transfer a tensor of {from} elements to a partition of {to}; use two partitions of the same tensor"
    )]
    DifferentTensors {
        /// Number of elements of the source partition.
        from: usize,
        /// Number of elements of the target partition.
        to: usize,
    },
}
