//! The graphs of a mode's plans, in files.

use std::path::PathBuf;

use super::Mode;
use crate::dump::{GraphDump, Watch};
use crate::error::Error;
use crate::graph::Graph;

impl Mode {
    /// Writes the graph of each plan into a folder of its own in `folder`, `graph-0` and so on in the order in which plans are
    /// made: for the first step, for those after it, for other shapes, for micro-batches, for evaluations. In each are the
    /// graph as it was traced and the graph after each pass, as text (as it [prints](crate::graph)), as a picture (SVG) and for
    /// Graphviz (DOT), and `changes.txt`, which tells what each pass has changed. See [`GraphDump`].
    ///
    /// Rank 0 of the mode's group writes. Plans and their fingerprints stay as they are; making one takes longer. Graphs of
    /// an earlier run are replaced when the first new one is complete. Steps that are compiled with clones of this
    /// mode number their graphs on. Of a plan that is refused there is all that was made until then, and the error.
    ///
    /// If graphs cannot be written, the step is refused on all ranks before it changes anything, on rank 0 with
    /// [`Error::Dump`].
    ///
    /// ```no_run
    /// use burn_fsdp_spmd::Mode;
    ///
    /// let mode = Mode::single().dump("graphs");
    /// ```
    #[must_use]
    pub fn dump(mut self, folder: impl Into<PathBuf>) -> Self {
        self.dump = Some(GraphDump::new(folder));
        self
    }

    /// Returns the mode without [`dump`](Self::dump).
    pub(crate) fn without_dump(mut self) -> Self {
        self.dump = None;
        self
    }

    /// Makes a plan, and writes the graphs that it is made of, if that was asked for.
    ///
    /// # Errors
    ///
    /// Those of `make`, whether its graphs were written or not; [`Error::Dump`].
    pub(crate) fn dumped<T>(
        &self,
        title: &str,
        make: impl FnOnce(&mut Watch<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let is_first = self.ranks.group().rank() == 0;
        let Some(dump) = self.dump.as_ref().filter(|_| is_first) else {
            return make(&mut |_, _| {});
        };
        let mut record = dump.begin(title)?;
        let made = make(&mut |part: &'static str, graph: &Graph| record.see(part, graph));
        let written = record.end(made.as_ref().err());
        let made = made?;
        written?;
        Ok(made)
    }
}
