//! The result of a check, and a list of results that needs no allocator.

use mercury_abi::code::Code;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Information; the operator need not act.
    Note,
    /// A warning: attach goes on, but something may be slower or behave in another way.
    Warn,
    /// A refusal: attach does not take place.
    Refuse,
}

/// The finding of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Code of the condition, for `mercury explain`.
    pub code: Code,
    /// Severity of the condition.
    pub severity: Severity,
    /// Values to which the code's explanation refers: the offending bits first, the whole value
    /// second.
    pub detail: [u64; 2],
}

impl Finding {
    /// Returns a refusal: a reason not to attach.
    pub(crate) const fn refuse(code: Code, first: u64, second: u64) -> Self {
        Self { code, severity: Severity::Refuse, detail: [first, second] }
    }

    /// Returns a warning: a fact that the operator should know before attaching.
    pub(crate) const fn warn(code: Code, first: u64, second: u64) -> Self {
        Self { code, severity: Severity::Warn, detail: [first, second] }
    }

    /// Returns a note: a fact that explains later surprises.
    pub(crate) const fn note(code: Code, first: u64, second: u64) -> Self {
        Self { code, severity: Severity::Note, detail: [first, second] }
    }

    /// Returns true if the finding refuses an attach.
    #[must_use]
    pub fn refuses(&self) -> bool {
        self.severity == Severity::Refuse
    }
}

/// A list of at most [`Findings::CAPACITY`] findings. A finding that does not fit is dropped; the
/// checks are fewer than the places.
#[derive(Clone, Debug)]
pub struct Findings {
    slots: [Option<Finding>; Self::CAPACITY],
}

impl Findings {
    /// Number of findings for which the list has places.
    pub const CAPACITY: usize = 64;

    /// Returns the findings, in the order of the checks.
    pub fn iter(&self) -> impl Iterator<Item = &Finding> {
        self.slots.iter().flatten()
    }

    /// Returns the first refusal, if there is one.
    #[must_use]
    pub fn first_refusal(&self) -> Option<&Finding> {
        self.iter().find(|finding| finding.refuses())
    }

    /// Returns true if there are no findings.
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
