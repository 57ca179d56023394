//! The dirty log of this machine, from the driver's `LogBegin` to its `End`.

use mercury_abi::code::Code;
use mercury_abi::gate::OwnedRange;
use mercury_abi::snapshot::{LogCollect, LogSetup};

use super::Outcome;
use super::dirty_log::{Budget, DirtyLog, WrittenMap};
use super::ledger::Ledger;
use super::live::{ON_LOG, ON_SNAPSHOT};
use super::view::Access;
use crate::address::{GuestPhys, HostPhys};
use crate::argument::array;
use crate::cpu::Area;
use crate::exit::Answer;
use crate::paging::format::Format;
use crate::paging::table::PageTable;
use crate::vendor::Vendor;

/// Part of the dirty log that one `LogCollect` collects with interrupts off: some ten microseconds.
const BUDGET: Budget = Budget { words: 4096, pages: 128 };

/// A dirty log, and the maps of the driver that it fills.
#[derive(Debug)]
pub(super) struct Recording<F> {
    log: DirtyLog<F>,
    /// Pages written since they were collected last.
    written: WrittenMap<'static>,
    /// Pages collected; the driver clears its bits.
    pub(super) collected: WrittenMap<'static>,
    /// Reason that the log is incomplete; `Ok` while it has every write.
    invalid: Code,
}

impl<F: Format<Address = GuestPhys>> Recording<F> {
    /// Prepares a dirty log of the ranges, over the identity map's tables.
    pub(super) fn begin(
        ledger: &mut Ledger,
        base: PageTable<F>,
        ranges: &[OwnedRange],
        setup: &LogSetup,
    ) -> Result<Self, Code> {
        // SAFETY: the driver keeps the arrays of `LogBegin`, and the bitmaps that they lead to, where they
        // are until `End`, in memory that it has mapped. Both sides change bits by locked instructions
        // only. No address is 0.
        let map = |address| unsafe { array(address, setup.map_count) }.map(WrittenMap);
        let (written, collected) = (map(setup.written_virt)?, map(setup.collected_virt)?);
        let log = DirtyLog::new(ledger, base, ranges).map_err(|_| Code::SnapshotPool)?;
        Ok(Self { log, written, collected, invalid: Code::Ok })
    }

    /// Returns the host-physical root of the log's tables.
    pub(super) const fn root(&self) -> HostPhys {
        self.log.root()
    }

    /// Returns true if the log has every write.
    pub(super) const fn is_complete(&self) -> bool {
        self.log.is_complete()
    }

    /// Answers a nested fault of a CPU on the log's tables. An empty pool makes the log incomplete.
    pub(super) fn fault(
        &mut self,
        ledger: &mut Ledger,
        ranges: &[OwnedRange],
        address: GuestPhys,
        access: Access,
    ) -> Outcome {
        let outcome = self.log.fault(ledger, ranges, self.written, address, access);
        if outcome != Outcome::Exhausted {
            return outcome;
        }
        self.invalid = Code::SnapshotPool;
        self.log.invalidate();
        // Nothing is recorded from here on, so that no page is needed.
        self.log.fault(ledger, ranges, self.written, address, access)
    }

    /// Takes over a change of the identity map at an address.
    pub(super) fn adopt(&self, ledger: &mut Ledger, address: GuestPhys) {
        self.log.view().adopt(ledger, address);
    }

    /// Makes the log incomplete, if it was complete.
    pub(super) const fn invalidate(&mut self, because: Code) {
        if self.log.is_complete() {
            self.log.invalidate();
            self.invalid = because;
        }
    }

    /// Moves written pages to the collected ones, as far as the budget goes.
    pub(super) fn collect(&self, ledger: &mut Ledger, collect: &mut LogCollect) -> Result<(), Code> {
        if !self.is_complete() {
            return Err(self.invalid);
        }
        let cursor = GuestPhys::new(collect.next_phys);
        let (moved, next) = self.log.collect(ledger, self.written, self.collected, cursor, BUDGET);
        collect.pages += moved;
        collect.next_phys = next.map_or(u64::MAX, |next| next.as_u64());
        Ok(())
    }
}

/// Puts this CPU on the tables of the log, without any older translation:
/// [`mercury_abi::snapshot::SnapshotCall::LogEnter`].
pub(super) fn enter<V: Vendor>(area: &mut Area<V>) -> Answer {
    if area.cpu.on_snapshot == ON_SNAPSHOT {
        return Answer::Hypercall(Code::SnapshotLive, 0);
    }
    let root = V::tables().lock().and_then(|guard| guard.as_ref().and_then(|nested| nested.live.log_root()));
    let Some(root) = root else { return Answer::Hypercall(Code::NoSnapshot, 0) };
    area.cpu.on_snapshot = ON_LOG;
    Answer::NewTables(root)
}
