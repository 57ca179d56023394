//! Exit statuses that a script can tell apart.

use mercury_abi::code::Code;
use serde::Serialize;

/// The exit status of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Exit {
    /// The command did its work.
    Done = 0,
    /// The command was refused or failed; nothing was left half done.
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The command is not possible on this machine as it is; `mercury doctor` says why.
    Impossible = 3,
    /// Another process controls Mercury.
    Busy = 4,
    /// The state is wrong for the command: not loaded, still attached, crashed.
    State = 5,
    /// The user is not root.
    Permission = 6,
    /// The command was interrupted by Ctrl-C or SIGTERM, with the machine in a consistent state.
    Interrupted = 130,
}

/// The statuses as the manual pages and `--help` print them.
pub const TABLE: &str = "\
Exit status:
  0    done
  1    refused or failed; nothing was left half done
  2    wrong usage
  3    not possible on this machine as it is (`mercury doctor` says why)
  4    busy: another process controls Mercury
  5    wrong state: not loaded, still attached, or crashed
  6    not root
  130  interrupted; the machine is in a consistent state";

impl Exit {
    /// Returns the status for a code.
    #[must_use]
    pub fn of(code: Code) -> Self {
        match code {
            Code::Ok => Self::Done,
            Code::Busy => Self::Busy,
            Code::NotLoaded | Code::AlreadyLoaded | Code::StillAttached | Code::Crashed => Self::State,
            Code::OrphanedHypervisor | Code::LockedDown | Code::MacsecInUse | Code::RestoreMemory => {
                Self::Impossible
            }
            Code::SelfTestFailed => Self::Failed,
            code if matches!(code as u32, 40..100 | 180..220) => Self::Impossible,
            _ => Self::Failed,
        }
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_statuses() {
        assert_eq!(Exit::of(Code::Ok), Exit::Done);
        assert_eq!(Exit::of(Code::SvmDisabled), Exit::Impossible);
        assert_eq!(Exit::of(Code::Busy), Exit::Busy);
        assert_eq!(Exit::of(Code::StillAttached), Exit::State);
        assert_eq!(Exit::of(Code::InjectedFault), Exit::Failed);
        assert_eq!(Exit::of(Code::NoContiguousMemory), Exit::Failed);
        assert_eq!(Exit::of(Code::GuestDescription), Exit::Impossible);
    }

    #[test]
    fn the_table_names_every_status() {
        for exit in [0_u8, 1, 2, 3, 4, 5, 6, 130] {
            assert!(TABLE.contains(&format!("\n  {exit} ")), "{exit}");
        }
    }
}
