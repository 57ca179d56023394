//! Manual pages and shell completions, from the definition of the command line.

use crate::{args::Cli, exit};
use clap::{Arg, Command, CommandFactory};
use clap_complete::{Shell, generate_to};
use std::{fs, io, path::Path};

/// Section of the manual: system administration.
const SECTION: &str = "8";

/// Writes a page for the command and one for each of its visible subcommands.
pub fn man(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let mut command = Cli::command();
    command.build();
    page(&command, directory, "mercury")
}

fn page(command: &Command, directory: &Path, name: &str) -> io::Result<()> {
    let title = name.replace(' ', "-");
    let named = command.clone().name(title.clone()).bin_name(name).after_help(exit::TABLE);
    let mut text = Vec::new();
    clap_mangen::Man::new(named).title(title.to_uppercase()).section(SECTION).render(&mut text)?;
    fs::write(directory.join(format!("{title}.{SECTION}")), text)?;
    let visible = |sub: &&Command| !sub.is_hide_set() && sub.get_name() != "help";
    command
        .get_subcommands()
        .filter(visible)
        .try_for_each(|sub| page(sub, directory, &format!("{name} {}", sub.get_name())))
}

/// Writes the completions of the shells that people use.
pub fn completions(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let mut command = Cli::command();
        command.build();
        generate_to(shell, &mut offered(&command), "mercury", directory)?;
    }
    Ok(())
}

/// The command without what is hidden, which the shells would offer otherwise: its subcommands and options as far as
/// completions show them.
fn offered(command: &Command) -> Command {
    let about = command.get_about().cloned().unwrap_or_default();
    let visible = command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help");
    let built_in = |arg: &&Arg| matches!(arg.get_id().as_str(), "help" | "version");
    let arguments = command.get_arguments().filter(|arg| !arg.is_hide_set() && !built_in(arg));
    Command::new(command.get_name().to_owned())
        .about(about)
        .disable_version_flag(command.get_version().is_none())
        .version(command.get_version().unwrap_or_default().to_owned())
        .args(arguments.map(shown))
        .subcommands(visible.map(offered))
}

/// An option or argument by itself: what it goes with and what not is nothing that completions know.
fn shown(arg: &Arg) -> Arg {
    let mut shown = Arg::new(arg.get_id().clone())
        .action(arg.get_action().clone())
        .value_parser(arg.get_value_parser().clone())
        .value_hint(arg.get_value_hint());
    shown = arg.get_long().into_iter().fold(shown, |shown, long| shown.long(long.to_owned()));
    shown = arg.get_short().into_iter().fold(shown, Arg::short);
    shown = arg.get_help().into_iter().fold(shown, |shown, help| shown.help(help.clone()));
    shown = arg.get_num_args().into_iter().fold(shown, Arg::num_args);
    shown = arg.get_index().into_iter().fold(shown, Arg::index);
    match arg.get_value_names() {
        Some(names) if arg.get_action().takes_values() => shown.value_names(names.to_vec()),
        _ => shown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn pages_for_all_commands() {
        let directory = tempfile::tempdir().expect("temporary directory");
        man(directory.path()).expect("pages");
        for name in ["mercury", "mercury-attach", "mercury-doctor", "mercury-bench-switch"] {
            let text = fs::read_to_string(directory.path().join(format!("{name}.8"))).expect(name);
            assert!(text.contains("not possible on this machine"), "{name}");
        }
        assert!(!directory.path().join("mercury-fault.8").exists());
    }

    #[test]
    fn completions_for_three_shells() {
        let directory = tempfile::tempdir().expect("temporary directory");
        completions(directory.path()).expect("completions");
        assert_eq!(fs::read_dir(directory.path()).expect("directory").count(), 3);
    }

    /// Names of all that is hidden, at any depth, or of all that is not.
    fn names(command: &Command, hidden: bool, into: &mut BTreeSet<String>) {
        let options = command.get_arguments().filter(|arg| arg.is_hide_set() == hidden);
        into.extend(options.filter_map(|arg| Some(format!("--{}", arg.get_long()?))));
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            names(sub, hidden, into);
        }
    }

    #[test]
    fn completions_offer_what_is_shown_and_nothing_that_is_hidden() {
        let directory = tempfile::tempdir().expect("temporary directory");
        completions(directory.path()).expect("completions");
        let bash = fs::read_to_string(directory.path().join("mercury.bash")).expect("a file");
        let words: BTreeSet<&str> = bash.split([' ', '"', '\n', ')', '(']).collect();
        let [mut hidden, mut shown] = [BTreeSet::new(), BTreeSet::new()];
        names(&Cli::command(), true, &mut hidden);
        names(&Cli::command(), false, &mut shown);
        assert!(hidden.len() > 5 && shown.len() > 50);
        assert!(shown.iter().all(|name| words.contains(name.as_str())), "{shown:?}");
        for name in hidden.difference(&shown) {
            assert!(!words.contains(name.as_str()), "{name}");
        }
        for subcommand in Cli::command().get_subcommands() {
            let is_offered = words.contains(format!("mercury,{}", subcommand.get_name()).as_str());
            assert_eq!(is_offered, !subcommand.is_hide_set(), "{}", subcommand.get_name());
        }
    }
}
