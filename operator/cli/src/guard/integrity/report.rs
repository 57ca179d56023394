//! What passes have found, in words and in a file for other processes.

use mercury_control::output::{Render, Text, Tone, bytes, thousands};
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

/// Findings that are kept.
const KEPT: usize = 16;
const FILE: &str = "state";
/// [`Finding::kind`] of a register.
pub const KIND_OF_REGISTERS: &str = "register";
/// [`Finding::kind`] of stores to code and constants.
pub const KIND_OF_STORES: &str = "store";

/// The end of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// The bytes are as the copy has them again.
    Mended,
    /// The rules say that findings are only reported.
    Reported,
    /// The driver could not mend them. The next pass tries again.
    NotMended,
    /// The bytes may be somebody's on purpose: a breakpoint, a jump of a probe.
    Unclaimed,
}

/// Bytes that nobody is known to have changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Address of the first byte, in hexadecimal; of a register its CPU; of stores that were lost nothing.
    pub address: String,
    /// Symbol and offset, and the module; or the register.
    pub symbol: String,
    /// Part: `kernel`, `registers`, or the module.
    pub part: String,
    /// Kind: `code`, `constants`, `register` or `store`.
    pub kind: String,
    /// Bytes of the copy, in hexadecimal.
    pub before: String,
    /// Bytes found there.
    pub found: String,
    /// Number of bits that differ.
    pub bits: u32,
    /// End of the finding.
    pub end: End,
    /// Reason for which the driver did not mend them; of a store its maker.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub why: Option<String>,
    /// Time in seconds since 1970.
    pub time: u64,
}

impl Finding {
    /// Returns the finding in words.
    #[must_use]
    pub fn text(&self) -> String {
        if self.kind == KIND_OF_STORES {
            let by = self.why.as_deref().unwrap_or("unknown code");
            if self.address.is_empty() {
                return format!("{} by {by}", self.symbol);
            }
            return format!("a store to {} ({}) by {by}", self.symbol, self.address);
        }
        let Self { address, symbol, kind, before, found, bits, .. } = self;
        let bits = if *bits == 1 { "1 bit".to_owned() } else { format!("{bits} bits") };
        let end = match (self.end, &self.why) {
            (End::Mended, _) => "mended".to_owned(),
            (End::Reported, _) => "not mended, by the rules".to_owned(),
            (End::NotMended, Some(why)) => format!("not mended: {why}"),
            (End::NotMended, None) => "not mended".to_owned(),
            (End::Unclaimed, _) => "not mended, because a debugger or a probe may have done it".to_owned(),
        };
        format!("{kind} changed at {symbol} ({address}): {before} became {found}, {bits}; {end}")
    }

    /// Returns the name of the event.
    #[must_use]
    pub fn event(&self) -> &'static str {
        match self.end {
            _ if self.kind == KIND_OF_REGISTERS => "register-changed",
            _ if self.kind == KIND_OF_STORES => "code-written",
            End::Mended => "code-mended",
            End::Reported => "code-changed",
            End::NotMended => "code-not-mended",
            End::Unclaimed => "code-unclaimed",
        }
    }
}

/// What the passes so far have found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Parts that are compared: the kernel and its modules.
    pub parts: usize,
    /// Bytes that are compared in each pass.
    pub bytes: u64,
    /// Bytes of memory that the copy takes.
    pub copy_bytes: u64,
    /// Number of passes.
    pub passes: u64,
    /// Time of the last pass, in seconds since 1970.
    pub last_pass: u64,
    /// Duration of the last pass in milliseconds.
    pub last_pass_ms: u64,
    /// Bytes that differ, last time, because the kernel has changed them itself.
    pub own_changes: u64,
    /// Places of which the last pass could say nothing, because the kernel was changing them.
    #[serde(default)]
    pub busy: u64,
    /// CPUs whose registers were compared last time; 0: the driver is not loaded.
    #[serde(default)]
    pub cpus: usize,
    /// Pages that are read-only in the nested tables.
    #[serde(default)]
    pub guarded: u64,
    /// Reason that there are none, or not all.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub not_guarded: Option<String>,
    /// Number of foreign stores that were seen.
    #[serde(default)]
    pub stores: u64,
    /// Number of findings, without stores.
    pub found: u64,
    /// Number of findings that were mended.
    pub mended: u64,
    /// The last findings.
    pub findings: Vec<Finding>,
}

impl State {
    /// Reads the state in a folder.
    #[must_use]
    pub fn read(folder: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(folder.join(FILE)).ok()?).ok()
    }

    /// Writes it.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no room.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        let new = folder.join("state.new");
        fs::write(&new, serde_json::to_vec(self)?)?;
        fs::rename(new, folder.join(FILE))
    }

    /// Adds the findings of a pass.
    pub fn add(&mut self, findings: &[Finding]) {
        let stores = findings.iter().filter(|finding| finding.kind == KIND_OF_STORES).count() as u64;
        self.stores += stores;
        self.found += findings.len() as u64 - stores;
        self.mended += findings.iter().filter(|finding| finding.end == End::Mended).count() as u64;
        self.findings.extend_from_slice(findings);
        let surplus = self.findings.len().saturating_sub(KEPT);
        self.findings.drain(..surplus);
    }
}

/// Returns the seconds since 1970.
#[must_use]
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

impl Render for State {
    fn render(&self, to: &mut Text) {
        to.line(format!(
            "integrity: {} of code and constants in {} parts, {} for the copy",
            bytes(self.bytes),
            self.parts,
            bytes(self.copy_bytes)
        ));
        let ago = now().saturating_sub(self.last_pass);
        to.line(match self.passes {
            0 => "no pass yet".to_owned(),
            passes => format!(
                "passes: {}, the last {} s ago in {} ms; bytes that the kernel has changed itself: {}",
                thousands(passes),
                thousands(ago),
                thousands(self.last_pass_ms),
                thousands(self.own_changes)
            ),
        });
        if self.busy > 0 {
            to.line(format!(
                "places that the kernel was changing: {}, for the next pass",
                thousands(self.busy)
            ));
        }
        to.line(match self.cpus {
            0 => "registers are not compared: the driver is not loaded".to_owned(),
            cpus => format!("CPUs whose registers are compared: {cpus}"),
        });
        if self.guarded > 0 || self.stores > 0 {
            let (pages, stores) = (thousands(self.guarded), thousands(self.stores));
            to.line(format!(
                "pages that are read-only beneath the kernel: {pages}; foreign stores: {stores}"
            ));
        }
        if let Some(why) = &self.not_guarded {
            to.line(format!("not all stores are seen: {why}"));
        }
        let tone = if self.found == 0 { Tone::Good } else { Tone::Bad };
        let found = to.tone(tone, &thousands(self.found));
        to.line(format!("changes that nobody owns: {found}; mended: {}", thousands(self.mended)));
        for finding in &self.findings {
            to.line(format!("  {}", finding.text()));
        }
    }
}

/// The result of `mercury guard scrub`.
#[derive(Debug, Serialize)]
pub struct Pass {
    /// Findings of this pass.
    pub found: Vec<Finding>,
    /// All passes so far.
    pub integrity: State,
}

impl Render for Pass {
    fn render(&self, to: &mut Text) {
        if self.found.is_empty() {
            let same = to.tone(Tone::Good, "as the copy has them");
            to.line(format!("code and constants are {same}"));
        }
        for finding in &self.found {
            to.line(finding.text());
        }
        self.integrity.render(to);
    }
}
