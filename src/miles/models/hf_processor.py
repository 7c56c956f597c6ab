"""Loading of transformers processors (AutoProcessor) with Pillow image processors, without torchvision.

transformers marks processors as needing torchvision whose Pillow image processor does not: its lazy modules then give
a placeholder in place of the class. The class itself is in a module that can be imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from miles.core.errors import UsageError, describe_error
from miles.models.media_config import read_processor_settings


def load_hf_processor(folder: Path, tokenizer: Any, *, trust_remote_code: bool = False) -> Any:
    """The transformers processor of a checkpoint folder around a tokenizer, with a Pillow image processor.

    It has no video processor, which needs torchvision. UsageError if the processor needs a package that is missing.
    """
    settings = read_processor_settings(folder)
    name = settings.get("processor_class")
    try:
        processor_class = None if name is None else _find_processor_class(str(name))
        if processor_class is None:
            if not trust_remote_code:
                raise UsageError(
                    f"The processor of {folder} is {name or 'unnamed'}, which transformers does not know; allow the "
                    "checkpoint's own code with --trust-remote-code."
                )
            from transformers import AutoProcessor

            return AutoProcessor.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        base = str(settings["image_processor_type"]).removesuffix("Fast").removesuffix("Pil")
        image_class = _find_image_class(f"{base}Pil") or _find_image_class(base)
        if image_class is None:
            raise UsageError(f"transformers has no image processor {base}, which {folder} names.")
        parts: dict[str, Any] = {
            "image_processor": image_class.from_pretrained(folder, local_files_only=True),
            "tokenizer": tokenizer,
        }
        return _build_hf_processor(processor_class, folder, parts)
    except UsageError:
        raise
    except ImportError as error:
        package = _find_missing_package(error)
        raise UsageError(
            f"The processor {name} of {folder} needs {package} in this version of transformers, and it is not "
            f"installed; run pip install 'miles-rl[vision]', or pip install {package}."
        ) from error
    except Exception as error:  # any error of the loader on a damaged folder
        raise UsageError(f"The processor of {folder} cannot be loaded ({describe_error(error)}).") from error


def _find_missing_package(error: ImportError) -> str:
    """The package that an error of transformers is about."""
    is_words = "num2words" in str(error) and find_spec("num2words") is None
    return "num2words" if is_words else "torchvision"


def _build_hf_processor(processor_class: Any, folder: Path, parts: dict[str, Any]) -> Any:
    class WithoutVideo(processor_class):
        """The checkpoint's processor, which may lack parts that images do not need."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    WithoutVideo.__name__ = processor_class.__name__
    settings, _ = processor_class.get_processor_dict(folder, local_files_only=True)
    names = processor_class.get_attributes()
    args = [parts.get(name) for name in names]
    return WithoutVideo.from_args_and_dict(args, settings)


def _find_processor_class(name: str) -> Any:
    """The class of a processor; None if transformers has none of that name, ImportError if it cannot be imported."""
    from transformers.models.auto import processing_auto
    from transformers.processing_utils import ProcessorMixin

    try:
        found = processing_auto.processor_class_from_name(name)
    except ImportError:  # of a module that imports torchvision itself
        found = name
    if found is None or (isinstance(found, type) and issubclass(found, ProcessorMixin)):
        return found
    names = processing_auto.PROCESSOR_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]
    for folder in _list_model_folders(names, name):
        return getattr(_import_with_pillow(f"transformers.models.{folder}.processing_{folder}", folder), name)
    raise ImportError(f"{name} is a placeholder for a class whose requirements are missing")


def _find_image_class(name: str) -> Any:
    """The class of an image processor; None if transformers has none of that name."""
    from transformers.image_processing_base import ImageProcessingMixin
    from transformers.models.auto import image_processing_auto

    found = image_processing_auto.get_image_processor_class_from_name(name)
    if found is None or issubclass(found, ImageProcessingMixin):
        return found
    if name.endswith("Pil"):
        names = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]
        for folder in _list_model_folders(names, name):
            module = importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
            if hasattr(module, name):
                return getattr(module, name)
    raise ImportError(f"{name} is a placeholder for a class whose requirements are missing")


def _list_model_folders(names: Any, class_name: str) -> Iterator[str]:
    """The folders of the models that use a class, from a mapping of transformers; the model named so first."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    def list_classes(value: Any) -> tuple[str, ...]:
        return (value,) if isinstance(value, str) else tuple(value.values() if isinstance(value, dict) else value)

    folders = [model_type_to_module_name(kind) for kind, value in names.items() if class_name in list_classes(value)]
    own = class_name.removesuffix("Pil").removesuffix("ImageProcessor").removesuffix("Processor").lower()
    yield from sorted(dict.fromkeys(folders), key=lambda folder: folder.replace("_", "") != own)


def _import_with_pillow(module: str, folder: str) -> Any:
    """Import a module that takes functions from the torchvision image processor of its model, where it is missing.

    Those of the Pillow image processor are the same, and stand in for the import only.
    """
    torchvision = f"transformers.models.{folder}.image_processing_{folder}"
    pillow = f"transformers.models.{folder}.image_processing_pil_{folder}"
    if find_spec("torchvision") is not None or find_spec(pillow) is None:
        return importlib.import_module(module)
    sys.modules[torchvision] = importlib.import_module(pillow)
    try:
        return importlib.import_module(module)
    finally:
        del sys.modules[torchvision]
