"""Plug room: frozen generators that turn actions into pictures.

A plug exports `Config`, `ACCEPTS`, `MAKES_IMAGES`, `prompt_template`, `negative_prompt`,
`validate`, `parameter_counts`, `activation_counts` and `build`; `rl.api.contracts.Renderer` is what
it builds. Files with a leading underscore are shared parts, not plugs.
"""
