"""Configurations of models, policies and tasks, including names without a file.

`policy=caote_knorm` and `policy=snapkv_kivi_g32` are composed of several files, `task=lm_eval/gsm8k` names a task of
lm-eval, `model=/folder` is a folder. A part may leave fields to the defaults of its class, so these nodes are open:
`policy.scorer.window=16` needs no `+`; an unknown field is refused when the part is built.
"""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

CONF = "pkg://kvbench.conf"
GROUPS = ("model", "policy", "task")


class KvbenchSearchPath(SearchPathPlugin):
    """Puts `KvbenchSource` before kvbench's own configurations; other applications are left alone."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Change the search path of a Hydra application that starts."""
        if any(element.path == CONF for element in search_path.get_path()):
            search_path.prepend("kvbench", "kvbench://conf", SearchPathQuery(path=CONF))


class KvbenchSource(ConfigSource):
    """The groups `model`, `policy` and `task`."""

    @staticmethod
    def scheme() -> str:
        """The scheme of its entry in the search path."""
        return "kvbench"

    def available(self) -> bool:
        """It is part of the package."""
        return True

    def is_group(self, config_path: str) -> bool:
        """The groups are listed by the source of the files."""
        return False

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Composed names cannot be listed: there is no end of them."""
        return []

    def is_config(self, config_path: str) -> bool:
        """Whether a name of these groups has a file or is composed of others."""
        from kvbench.config.named import composed_config
        from kvbench.config.tree import find

        group, _, name = config_path.removesuffix(".yaml").partition("/")
        if group not in GROUPS:
            return False
        try:
            return find(group, name, folders()) is not None or composed_config(group, name, folders()) is not None
        except ValueError as error:
            raise ConfigCompositionException(str(error)) from error

    def load_config(self, config_path: str) -> ConfigResult:
        """The configuration of a name, open for fields that it leaves to the defaults of a class."""
        from kvbench.config.named import composed_config
        from kvbench.config.tree import find

        group, _, name = config_path.removesuffix(".yaml").partition("/")
        file = find(group, name, folders())
        if file is None:
            config, header = OmegaConf.create(composed_config(group, name, folders())), {"package": None}
        else:
            config, header = OmegaConf.load(file), self._get_header_dict(file.read_text(encoding="utf-8"))
        OmegaConf.set_struct(config, False)
        return ConfigResult(config=config, path=f"kvbench://{config_path}", provider=self.provider, header=header)


def folders() -> list[Path]:
    """The folders of --config-dir and hydra.searchpath, which may hold parts of a composed name."""
    if not GlobalHydra.instance().is_initialized():
        return []
    sources = GlobalHydra.instance().config_loader().get_sources()
    return [Path(source.path) for source in sources if source.scheme() == "file"]
