//! What a check says, and a list of it that needs no allocator.

use mercury_abi::code::Code;

/// How grave a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Good to know; nothing to do.
    Note,
    /// Attach goes on, but something may be slower or behave in another way.
    Warn,
    /// Attach is refused.
    Refuse,
}

/// What one check found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Which condition.
    pub code: Code,
    /// How grave it is.
    pub severity: Severity,
    /// What the code's explanation refers to: offending bits first, the whole value second.
    pub detail: [u64; 2],
}

impl Finding {
    /// A reason not to attach.
    pub(crate) const fn refuse(code: Code, first: u64, second: u64) -> Self {
        Self { code, severity: Severity::Refuse, detail: [first, second] }
    }

    /// Something that the operator should know before attaching.
    pub(crate) const fn warn(code: Code, first: u64, second: u64) -> Self {
        Self { code, severity: Severity::Warn, detail: [first, second] }
    }

    /// Something that explains later surprises.
    pub(crate) const fn note(code: Code, first: u64, second: u64) -> Self {
        Self { code, severity: Severity::Note, detail: [first, second] }
    }

    /// Whether attach must be refused because of this.
    #[must_use]
    pub fn refuses(&self) -> bool {
        self.severity == Severity::Refuse
    }
}

/// A list of at most [`Findings::CAPACITY`] findings. One that does not fit is dropped; there are
/// fewer checks than places.
#[derive(Clone, Debug)]
pub struct Findings {
    slots: [Option<Finding>; Self::CAPACITY],
}

impl Findings {
    /// Places in the list.
    pub const CAPACITY: usize = 64;

    /// The findings, in the order of the checks.
    pub fn iter(&self) -> impl Iterator<Item = &Finding> {
        self.slots.iter().flatten()
    }

    /// The first reason not to attach.
    #[must_use]
    pub fn first_refusal(&self) -> Option<&Finding> {
        self.iter().find(|finding| finding.refuses())
    }

    /// Whether nothing was found.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }
}

impl FromIterator<Finding> for Findings {
    fn from_iter<I: IntoIterator<Item = Finding>>(findings: I) -> Self {
        let mut slots = [None; Self::CAPACITY];
        for (slot, finding) in slots.iter_mut().zip(findings) {
            *slot = Some(finding);
        }
        Self { slots }
    }
}
